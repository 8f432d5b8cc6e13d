"""Choosing tokens for rows that ask for different things: cases P01, P04, P07, P13 and every filter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qinfer.engine import sampler
from qinfer.engine.engine import Engine
from qinfer.engine.request import Request, Sequence, StopRules
from qinfer.engine.sampler import Sampled, sample, uniform
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams

Generate = Callable[..., dict[str, RequestOutput]]
EOS = 3


def make(
    seq_id: int,
    output: list[int] | None = None,
    *,
    prompt: list[int] | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    **fields: Any,
) -> Sequence:
    params = SamplingParams(**fields)
    rules = StopRules(frozenset([EOS]), frozenset(params.stop_token_ids), params.min_tokens, 100)
    prompt = prompt or [0]
    request = Request(str(seq_id), prompt, params, rules, bad_words=bad_words)
    return Sequence(seq_id, request, 0, params.seed or 0, prompt + (output or []), num_pending=1)


def choose(rows: list[list[float]] | Tensor, *sequences: Sequence) -> list[Sampled]:
    return sample(torch.as_tensor(rows, dtype=torch.float32), list(sequences), None)


def ids(sampled: list[Sampled]) -> list[int]:
    return [result.token_id for result in sampled]


def test_uniform_numbers_are_reproducible_and_spread() -> None:
    numbers = [uniform(42, position) for position in range(4000)]
    assert numbers == [uniform(42, position) for position in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    counts = torch.histc(torch.tensor(numbers, dtype=torch.float64), 10, 0, 1)
    assert (counts - 400).abs().max() < 80  # 4 sigma
    assert uniform(-1, 0) != uniform(1, 0) != uniform(1, 1)


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-45, 0.0])
def test_p01_tiny_temperatures_are_greedy_beside_random_rows(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.1, float("-inf"), 0.0], [0.0, 0.0, 9.0, float("-inf")]])
    random = make(1, temperature=1.0, seed=1)
    assert ids(choose(logits, make(0, temperature=temperature), random)) == [1, 2]
    assert ids(choose(logits[1:], random)) == [2]


def test_rows_that_ask_for_copies_go_by_slices_to_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(3))
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "logprobs": 3},
        {"seed": 2, "repetition_penalty": 1.3},
        {"seed": 3, "logit_bias": {5: 2.0}},
        {"seed": 4, "top_k": 4},
        {"seed": 5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 0},
    ]
    rows = [make(i, [1, 1, 2], **fields) for i, fields in enumerate(asked)]
    whole = choose(logits, *rows)
    seen: list[int] = []

    def spy(part: Tensor, *args: Any) -> Tensor:
        seen.append(len(part))
        return adjust(part, *args)

    adjust = sampler._adjust
    monkeypatch.setattr(sampler, "_adjust", spy)
    monkeypatch.setattr(sampler, "SLICE_BYTES", 3 * 40 * 4)
    assert choose(logits, *rows) == whole
    assert seen == [3, 3, 1]
    seen.clear()
    assert choose(logits[:1].repeat(5, 1), *rows[:1] * 5) == whole[:1] * 5  # these ask for nothing
    assert seen == [5]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4])
def test_p01_small_temperatures_are_raised_and_stay_finite(temperature: float) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 10
    seq = make(0, temperature=temperature, seed=3)
    assert seq.request.params.temperature == 0.01
    assert ids(choose(logits, seq)) == logits.argmax(1).tolist()


def test_p04_a_seeded_row_is_the_same_in_any_company(
    make_engine: Callable[..., Engine], generate: Generate
) -> None:
    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(seed=seed, temperature=0.8, max_tokens=40, ignore_eos=True)

    first, second = list(range(10, 30)), list(range(50, 63))
    alone = generate(make_engine(), [first], params(42))["0"].outputs[0].token_ids
    for engine, prompts, seeds, place in (
        (make_engine(), [first, second], [42, None], "0"),
        (make_engine(), [first, second], [42, 7], "0"),
        (make_engine(), [second, first], [7, 42], "1"),
        (make_engine(num_kv_blocks=5), [second, first], [None, 42], "1"),  # with a preemption
    ):
        outputs = generate(engine, prompts, [params(seed) for seed in seeds])
        assert outputs[place].outputs[0].token_ids == alone
    assert engine.stats().num_preemptions > 0
    assert generate(make_engine(), [first], params(43))["0"].outputs[0].token_ids != alone


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them(
    make_engine: Callable[..., Engine], generate: Generate
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        outputs = generate(make_engine(seed=seed), [[1, 2, 3]] * 2, params)
        return [list(output.outputs[0].token_ids) for output in outputs.values()]

    assert run(0)[0] != run(0)[1]
    assert sorted(run(0)) == sorted(run(0)) != sorted(run(1))


def test_p07_penalties_stay_in_their_row() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0, -5.0], [2.0, 1.9, 0.0, -5.0]])
    plain = make(0, [1], temperature=0.0)
    penalized = make(1, [0, 0, 1, 0], temperature=0.0, frequency_penalty=1.05)
    assert ids(choose(logits, plain, penalized)) == [0, 1]
    assert ids(choose(logits[:1], plain)) == [0]


def test_repetition_penalty_counts_the_prompt_and_presence_does_not() -> None:
    logits = [[2.0, 1.9, 0.0, -5.0]]
    assert ids(choose(logits, make(0, prompt=[0], temperature=0.0, repetition_penalty=1.5))) == [1]
    assert ids(choose(logits, make(0, prompt=[0], temperature=0.0, presence_penalty=2.0))) == [0]
    assert ids(choose(logits, make(0, [0], prompt=[2], temperature=0.0, presence_penalty=2.0))) == [1]


def test_logit_bias_allowed_ids_and_bad_words() -> None:
    logits = [[2.0, 1.0, 0.0, -5.0]]
    assert ids(choose(logits, make(0, temperature=0.0, logit_bias={2: 3.0}))) == [2]
    assert ids(choose(logits, make(0, temperature=0.0, allowed_token_ids=[2, 3]))) == [2]
    assert ids(choose(logits, make(0, temperature=0.0, bad_words=((0,),)))) == [1]
    assert ids(choose(logits, make(0, [2], temperature=0.0, bad_words=((2, 0), (1, 1))))) == [1]
    # the word must have begun in the output
    assert ids(choose(logits, make(0, prompt=[2], temperature=0.0, bad_words=((2, 0),)))) == [0]


def test_allowed_ids_bind_a_random_row_too() -> None:
    logits = torch.zeros(1, 50)
    chosen = {
        choose(logits, make(0, seed=seed, allowed_token_ids=[4, 9]))[0].token_id for seed in range(1, 30)
    }
    assert chosen == {4, 9}


def test_min_tokens_bars_ends_until_it_is_reached() -> None:
    logits = [[0.0, 1.0, 2.0, 9.0]]
    waiting = make(0, [1], temperature=0.0, min_tokens=2, stop_token_ids=[2])
    assert ids(choose(logits, waiting)) == [1]
    assert ids(choose(logits, make(0, [1, 1], temperature=0.0, min_tokens=2))) == [EOS]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(1, 6))
def test_p13_logprobs_do_not_change_with_temperature_or_filters(temperature: float, seed: int) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
    expected = logits.double().log_softmax(1)[0]
    seq = make(0, temperature=temperature, seed=seed, logprobs=3, top_p=0.95, presence_penalty=0.5)
    (result,) = choose(logits, seq)
    assert result.logprobs is not None
    assert next(iter(result.logprobs)) == result.token_id
    best = expected.argsort(descending=True)[:3].tolist()
    assert set(result.logprobs) == {result.token_id, *best}
    for token, entry in result.logprobs.items():
        assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-5)
        assert entry.rank == int((expected > expected[token]).sum()) + 1


def test_p13_zero_logprobs_give_the_chosen_token_and_all_give_the_vocabulary() -> None:
    logits = torch.randn(2, 30)
    none, everything = choose(
        logits, make(0, temperature=0.0, logprobs=0), make(1, temperature=0.0, logprobs=-1)
    )
    assert none.logprobs is not None
    assert everything.logprobs is not None
    assert list(none.logprobs) == [none.token_id]
    assert len(everything.logprobs) == 30
    assert sum(torch.tensor(entry.logprob).exp() for entry in everything.logprobs.values()) == pytest.approx(
        1
    )


def test_cumulative_logprob_is_the_sum(make_engine: Callable[..., Engine], generate: Generate) -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    output = generate(make_engine(), [[1, 2, 3]], params)["0"].outputs[0]
    chosen = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    assert all(isinstance(entry.decoded_token, str) for entry in chosen)


def test_bad_words_never_appear(make_engine: Callable[..., Engine], generate: Generate) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    free = generate(make_engine(), [[70, 71, 72]], params)["0"].outputs[0]
    word = make_engine()._admission.tokenizer.decode(free.token_ids[3:4])
    if not word.strip() or "\ufffd" in word:
        word = "e"
    params.bad_words = [word]
    barred = generate(make_engine(), [[70, 71, 72]], params)["0"].outputs[0]
    assert make_engine()._admission.tokenizer.encode(word)[0] not in barred.token_ids


def test_named_tokens_are_told_beside_the_likeliest() -> None:
    logits = torch.randn(2, 40)
    plain, named = make(0, logprobs=2), make(1, logprobs=1, logprob_token_ids=[7, 39, 7])
    expected = logits.double().log_softmax(1)[1]
    first, second = (result.logprobs or {} for result in choose(logits, plain, named))
    assert len(first) in (2, 3)
    chosen, best = next(iter(second)), int(expected.argmax())
    assert set(second) == {chosen, best, 7, 39}
    for token, entry in second.items():
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert entry.rank == int((expected > expected[token]).sum()) + 1
    alone = make(1, logprob_token_ids=[7, 39])
    assert alone.request.params.logprobs == 0
    found = choose(logits[1:], alone)[0].logprobs or {}
    assert set(found) == {next(iter(found)), 7, 39}
