"""LLM.embed and LLM.beam_search: against hidden states and searches written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qinfer import LLM, BeamSearchParams
from qinfer.errors import UserError
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama3", tmp_path_factory.mktemp("tasks") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_kv_blocks=256, max_model_len=64)


def test_vectors_are_means_of_the_last_hidden_states(llm: LLM, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = llm.get_tokenizer().encode("One text")
    outputs = llm.embed(["One text", [70, 71, 72]], use_tqdm=False)
    for output, prompt in zip(outputs, (ids, [70, 71, 72]), strict=True):
        with torch.no_grad():
            mean = model.model(torch.tensor([prompt])).last_hidden_state[0].double().mean(0)
        assert output.outputs.embedding == pytest.approx((mean / mean.norm()).tolist(), abs=2e-5)
        assert output.prompt_token_ids == prompt
        assert output.finished


def test_beams_are_those_of_a_search_over_all_logits(llm: LLM) -> None:
    prompts = [[65, 66], [80]]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        beams = [(prompt, 0.0)]
        for _ in range(4):
            grown = []
            for ids, score in beams:
                top = list(llm.engine.prompt_logits(ids))[-1][-1].log_softmax(-1).topk(6)
                grown += [([*ids, int(t)], score + float(v)) for v, t in zip(*top, strict=True)]
            beams = sorted(grown, key=lambda beam: -beam[1] / len(beam[0]))[:3]
        assert [beam.tokens for beam in output.sequences] == [ids for ids, _ in beams]
        for beam, (ids, score) in zip(output.sequences, beams, strict=True):
            assert beam.cum_logprob == pytest.approx(score, abs=1e-4)
            assert beam.text == llm.get_tokenizer().decode(ids[len(prompt) :])
            assert (beam.finish_reason, len(beam.logprobs)) == ("length", 4)


def test_a_search_ends_where_the_context_does(llm: LLM) -> None:
    (output,) = llm.beam_search([65] * 60, BeamSearchParams(beam_width=2, max_tokens=100, ignore_eos=True))
    assert [len(beam.tokens) for beam in output.sequences] == [64, 64]
    with pytest.raises(UserError, match="64 tokens"):
        llm.beam_search([65] * 64, BeamSearchParams(beam_width=2, max_tokens=1))


@pytest.mark.parametrize(
    "bad", [{"beam_width": 0}, {"beam_width": 65}, {"max_tokens": 0}, {"length_penalty": -10.1}]
)
def test_bad_searches_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **bad})
    assert raised.value.parameter == next(iter(bad))


def test_what_is_not_there_says_so(llm: LLM) -> None:
    with pytest.raises(NotImplementedError, match="allowed_token_ids"):
        BeamSearchParams(2, 2, allowed_token_ids=[5])
    with pytest.raises(NotImplementedError, match="pooling_params"):
        llm.embed("x", pooling_params=1)


def test_scores_are_sums_of_log_probabilities(llm: LLM, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def expected(before: list[int], said: list[int]) -> float:
        with torch.no_grad():
            rows = model(torch.tensor([before + said])).logits[0].double().log_softmax(-1)
        return sum(float(rows[len(before) - 1 + i, token]) for i, token in enumerate(said))

    encode = llm.get_tokenizer().encode
    outputs = llm.score("The cat", [" sat", " flew away"], use_tqdm=False)
    for output, text in zip(outputs, (" sat", " flew away"), strict=True):
        before, whole = encode("The cat"), encode("The cat" + text)
        assert output.outputs.score == pytest.approx(expected(before, whole[len(before) :]), abs=1e-4)
        assert output.prompt_token_ids == whole
    pairs = llm.score([[65], [66, 67]], [[70], [71, 72]], use_tqdm=False)
    assert pairs[0].outputs.score == pytest.approx(expected([65], [70]), abs=1e-4)
    assert pairs[1].outputs.score == pytest.approx(expected([66, 67], [71, 72]), abs=1e-4)


def test_pairs_that_are_none_are_refused(llm: LLM) -> None:
    for first, second, message in (
        (["a", "b"], ["c"], "2 of data_1 and 1 of data_2"),
        ("a", "", "data_2 is empty"),
        ("a", [[65]], "both be texts"),
        ("a", "b", "'a' is part of the first token of both"),
    ):
        with pytest.raises(UserError, match=message):
            llm.score(first, second, use_tqdm=False)
    with pytest.raises(NotImplementedError, match="chat_template"):
        llm.score("a", "b", chat_template="x")
