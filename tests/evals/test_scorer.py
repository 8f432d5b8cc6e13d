"""Scores and answers of an engine: the rules of text, order, batch sizes, how generations end."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError
from qinfer.evals.scorer import Scorer, repetition
from qinfer.model.decoder import load_decoder
from qinfer.sampling_params import SamplingParams
from qinfer.testing import FakeRunner
from qinfer.tokenizer import Tokenizer

Make = Callable[..., Scorer]
EOS = 258


@pytest.fixture(scope="module")
def make(byte_level_folder: Path) -> Make:
    decoder = load_decoder(open_checkpoint(byte_level_folder))

    def build(
        script: Sequence[int] | None = None, folder: Path = byte_level_folder, **options: int
    ) -> Scorer:
        tokenizer = Tokenizer.load(folder)
        runner = None if script is None else FakeRunner(384, script)
        settled = EngineOptions(**{"num_kv_blocks": 64, "max_model_len": 256, **options})
        return Scorer(Engine(decoder, tokenizer, settled, runner=runner), tokenizer)

    return build


def test_e01_scores_do_not_depend_on_the_batch(make: Make) -> None:
    text = "the sun is hot and water runs down from the hills to the sea on every day of the year"
    words = text.split()
    contexts = [" ".join(words[: 1 + i % 9]) for i in range(20)]
    endings = [" ".join(words[i % 7 : i % 7 + 1 + i // 5]) for i in range(20)]
    items = [(context, f" {ending}") for context, ending in zip(contexts, endings, strict=True)]
    found = []
    for count in (1, 3, 8):
        scorer = make(max_num_seqs=count)
        found.append(scorer.logliks([scorer.encode_pair(*item) for item in items]))
    for others in found[1:]:
        assert [one.loglik for one in others] == pytest.approx([one.loglik for one in found[0]], abs=1e-4)
        assert [one.is_greedy for one in others] == [one.is_greedy for one in found[0]]
    assert len({round(one.loglik, 3) for one in found[0]}) == 20


def test_e02_a_text_begins_with_one_bos_where_the_tokenizer_adds_it(
    make: Make, sentencepiece_folder: Path
) -> None:
    plain, adding = make(), make(folder=sentencepiece_folder)
    for scorer, count in ((plain, 0), (adding, 1)):
        bos = scorer.tokenizer.bos_token_id
        assert scorer.prefix_id == bos
        assert scorer.encode("the end").count(bos) == count
        context, continuation = scorer.encode_pair("the", " end")
        assert [context.count(bos), continuation.count(bos)] == [count, 0]
    assert adding.encode("<s>the end").count(adding.prefix_id) == 1
    assert plain.encode("<|endoftext|>the end").count(plain.prefix_id) == 1


@pytest.mark.parametrize(
    ("context", "continuation", "spaces"),
    [("Ans", "wer", 0), ("hello wor", "ld", 0), ("e", "t", 0), ("see the", "n", 0), ("the end  ", "of", 2)],
)
def test_e04_at_least_one_token_is_scored(make: Make, context: str, continuation: str, spaces: int) -> None:
    scorer = make()
    before, scored = scorer.encode_pair(context, continuation)
    assert before
    assert scored
    if before != [scorer.prefix_id]:
        assert scorer.tokenizer.decode(before + scored) == context + continuation
    assert scorer.tokenizer.decode(scored).startswith(" " * spaces)
    assert scorer.tokenizer.decode(scored).endswith(continuation[-1])
    assert torch.isfinite(torch.tensor(scorer.logliks([(before, scored)])[0].loglik))


def test_e04_a_token_over_the_border_is_scored_whole(make: Make) -> None:
    scorer = make()
    (merged,) = scorer.tokenizer.encode("et")
    assert scorer.encode_pair("e", "t") == ([scorer.prefix_id], [merged])
    assert scorer.encode_pair("A e", "t") == (scorer.encode("A "), [merged])


def test_an_empty_context_is_the_bos(make: Make) -> None:
    scorer = make()
    assert scorer.encode_pair("", "AB") == ([256], [65, 66])
    assert scorer.encode_pair("", "<|endoftext|>AB") == ([256], [65, 66])
    assert scorer.encode_pair(" ", "AB") == ([256], scorer.encode(" AB"))
    with pytest.raises(UserError, match="nothing to score"):
        scorer.encode_pair("A", "")


def test_e05_after_truncation_the_continuation_alone_is_scored(make: Make, byte_level_folder: Path) -> None:
    scorer = make(max_model_len=3)  # capitals are one token each
    (found,) = scorer.logliks([scorer.encode_pair("ABC", "DE")])
    model = AutoModelForCausalLM.from_pretrained(byte_level_folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([[66, 67, 68]])).logits[0].log_softmax(-1)
    assert found.loglik == pytest.approx(float(logprobs[1, 68] + logprobs[2, 69]), abs=1e-4)
    (whole,) = scorer.logliks([([65], [66, 67, 68])])
    assert whole.loglik < 0
    with pytest.raises(UserError, match="4 tokens: between 1 and 3"):
        scorer.logliks([([65], [66, 67, 68, 69])])
    with pytest.raises(UserError, match="0 tokens"):
        scorer.logliks([([65], [])])


def test_answers_come_in_the_order_asked_and_say_how_they_ended(make: Make) -> None:
    scorer = make(script=[72, 105, 33, 10, 88, EOS])
    greedy = {"temperature": 0.0}
    asked = [
        ([90] * 3, SamplingParams(max_tokens=20, **greedy)),
        ([65] * 3, SamplingParams(max_tokens=20, stop=["\n"], **greedy)),
        ([70] * 3, SamplingParams(max_tokens=2, **greedy)),
    ]
    said = scorer.generate(asked)
    assert [one.text for one in said] == ["Hi!\nX", "Hi!\n", "Hi"]
    assert [one.generated.finish for one in said] == ["eos", "stop", "length"]
    assert [one.generated.num_tokens for one in said] == [6, 4, 2]


def test_a_long_prompt_loses_its_beginning(make: Make) -> None:
    scorer = make(script=lambda prompt: [len(prompt) + 60, prompt[0]], max_model_len=20)
    (one,) = scorer.generate([(list(range(65, 95)), SamplingParams(temperature=0.0, max_tokens=8))])
    assert one.text[:2] == chr(12 + 60) + chr(65 + 30 - 12)
    with pytest.raises(UserError, match="20 tokens are to be generated and the model reads 20"):
        scorer.generate([([65], SamplingParams(max_tokens=20))])


def test_repetition_is_the_share_of_fourgrams_said_before() -> None:
    assert repetition([]) == repetition([1, 2, 3]) == repetition(range(50)) == 0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition([7] * 13) == pytest.approx(9 / 10)


def test_what_goes_wrong_leaves_the_engine_idle(make: Make) -> None:
    scorer = make(script=[72, EOS])
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with pytest.raises(UserError, match="token id 5000"):
        scorer.generate([([65], greedy), ([5000], greedy)])
    assert not scorer.engine.has_unfinished()
    assert [one.text for one in scorer.generate([([65], greedy), ([], greedy)])] == ["H", "H"]


def test_logits_that_are_no_numbers_are_told(make: Make) -> None:
    scorer = make()
    norm = scorer.engine.runner.decoder.norm
    kept = norm.clone()
    norm.fill_(float("nan"))
    try:
        (said,) = scorer.generate([([65], SamplingParams(temperature=0.0, max_tokens=4))])
        (scored,) = scorer.logliks([([65], [66, 67])])
    finally:
        norm.copy_(kept)
    assert said.generated.finish == "error"
    assert scored.loglik != scored.loglik
    assert not scored.is_greedy
