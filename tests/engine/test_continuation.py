"""Scores of continuations: transformers' log-probabilities, in any chunks, company and state of the cache."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.continuation import Continuation
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError
from qinfer.model.decoder import load_decoder
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

NOTHING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
CONTEXT = [65 + i % 26 for i in range(40)]
CASES = [
    (CONTEXT, [70]),
    (CONTEXT, [71, 72, 73]),
    (CONTEXT[:1], [66, 67, 68, 69, 70]),
    ([*CONTEXT, 99], list(range(80, 110))),
    (CONTEXT[:32], [70, 71]),
]
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[float], list[bool]]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for context, continuation in CASES:
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation[:-1]])).logits[0, len(context) - 1 :]
        ids = torch.tensor(continuation)
        chosen = logits.double().log_softmax(1).gather(1, ids[:, None])[:, 0]
        found.append((chosen.tolist(), (logits.argmax(1) == ids).tolist()))
    return found


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    decoder, tokenizer = load_decoder(open_checkpoint(folder)), Tokenizer.load(folder)
    return lambda **options: Engine(decoder, tokenizer, EngineOptions(**{"num_kv_blocks": 64, **options}))


def scored(engine: Engine, cases: list[tuple[list[int], list[int]]], name: str = "") -> list[Continuation]:
    found = []
    for i, (context, ids) in enumerate(cases):
        found.append(Continuation(list(ids)))
        engine.add(f"{name}{i}", context + ids[:-1], NOTHING, continuation=found[-1])
    while engine.has_unfinished():
        engine.step()
        engine.pages.check([seq.pages for seq in engine.scheduler.running])
    return found


def check(found: list[Continuation], expected: list[tuple[list[float], list[bool]]]) -> None:
    for continuation, (logprobs, likeliest) in zip(found, expected, strict=True):
        assert continuation.logprobs == pytest.approx(logprobs, abs=2e-5)
        assert continuation.likeliest == likeliest


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_kv_blocks": 5},
        {"enable_prefix_caching": False},
    ],
)
def test_scores_are_those_of_transformers(make: Make, expected: list, options: dict) -> None:
    check(scored(make(**options), CASES), expected)


def test_the_likeliest_token_is_recognised(make: Make) -> None:
    engine = make()
    engine.add("greedy", CONTEXT, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    while engine.has_unfinished():
        outputs = engine.step()
    said = list(outputs[0].outputs[0].token_ids)
    (found,) = scored(engine, [(CONTEXT, said)])
    assert found.likeliest == [True] * 4
    (other,) = scored(engine, [(CONTEXT, [*said[:3], said[3] + 1])], "other")
    assert other.likeliest == [True, True, True, False]


def test_contexts_come_from_the_prefix_cache_and_scored_rows_do_not(make: Make, expected: list) -> None:
    engine = make()
    check(scored(engine, CASES), expected)
    before = engine.stats().prefix_hits
    check(scored(engine, CASES, "again"), expected)
    # rows from the last of the context on are computed: 39, 39, 0, 40 and 31 others, in whole pages
    assert engine.stats().prefix_hits - before == 32 + 32 + 0 + 32 + 16


def test_company_changes_nothing(make: Make, expected: list) -> None:
    engine = make()
    for i in range(4):
        engine.add(f"talk {i}", CONTEXT[: 9 * i + 3], SamplingParams(seed=i, max_tokens=30))
    check(scored(engine, CASES), expected)


def test_what_is_scored_may_be_preempted(make: Make, expected: list) -> None:
    """Four talkers outgrow the pool while a long prompt is under way in small chunks."""
    engine = make(num_kv_blocks=9, max_num_batched_tokens=8, max_num_seqs=6)
    for i in range(4):
        engine.add(f"talk {i}", CONTEXT[: i + 2], SamplingParams(seed=i, max_tokens=40, ignore_eos=True))
    check(scored(engine, CASES), expected)
    assert engine.stats().num_preemptions > 0


def test_a_text_may_fill_the_whole_context(make: Make) -> None:
    engine = make(max_model_len=41)
    (found,) = scored(engine, [(CONTEXT, [70, 71])])  # 41 tokens computed, the 42nd only scored
    assert len(found.logprobs) == 2
    with pytest.raises(UserError, match="maximum context length is 41"):
        engine.add("long", [*CONTEXT, 70, 71], NOTHING, continuation=Continuation([70, 71, 72]))
    with pytest.raises(UserError, match="maximum context length is 41"):
        engine.add("talk", [*CONTEXT, 70], NOTHING)
