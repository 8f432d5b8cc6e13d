"""The engine on tiny float32 models, where "the same tokens" means identical: cases of sections 1 and 2."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from qinfer.testing import FakeRunner

MakeEngine = Callable[..., Engine]
Generate = Callable[..., dict[str, RequestOutput]]


def greedy(max_tokens: int = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens(outputs: dict[str, RequestOutput], request_id: str = "0") -> list[int]:
    return list(outputs[request_id].outputs[0].token_ids)


# --- section 1: scheduler


def test_s01_a_prompt_that_never_fits_is_refused_and_the_next_is_served(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine = make_engine(block_size=16, num_kv_blocks=8, max_model_len=250)
    with pytest.raises(UserError, match="128") as raised:
        engine.add("big", prompt(200), greedy())
    assert raised.value.parameter == "prompt"
    assert len(tokens(generate(engine, [prompt(5)], greedy(4)))) == 4


def test_s01_a_prompt_just_under_the_capacity_runs(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine(num_kv_blocks=8, max_model_len=250)
    for length, expected in ((127, 2), (128, 1)):
        out = generate(engine, [prompt(length)], greedy(100))["0"].outputs[0]
        assert (out.finish_reason, len(out.token_ids)) == ("length", expected)


def test_s02_the_only_request_outgrows_the_pool(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine(num_kv_blocks=4)
    outputs = generate(engine, [prompt(40), prompt(6, 1)], [greedy(100), greedy(5)])
    assert outputs["0"].outputs[0].finish_reason == "length"
    assert len(tokens(outputs)) == 4 * 16 + 1 - 40
    assert len(tokens(outputs, "1")) == 5
    assert tokens(outputs) == tokens(generate(make_engine(), [prompt(40)], greedy(25)))


def test_a_pool_that_is_shorter_than_the_context_lowers_it_aloud(
    make_engine: MakeEngine, generate: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    token = make_engine().ledger.kv_pool // make_engine().ledger.tokens
    caplog.clear()
    engine = make_engine(num_kv_blocks=None, kv_cache_memory_bytes=64 * token)
    assert engine.limits.max_model_len == engine.ledger.max_model_len == engine.ledger.tokens == 64
    assert engine.ledger.sequences == 1
    (record,) = caplog.records
    said = record.getMessage()
    assert "the model's context is 256 tokens" in said
    assert said.endswith("holds 64: max_model_len is 64")
    outputs = generate(engine, [prompt(40)], greedy(100))
    assert (outputs["0"].outputs[0].finish_reason, len(tokens(outputs))) == ("length", 24)
    assert tokens(outputs) == tokens(generate(make_engine(), [prompt(40)], greedy(24)))
    with pytest.raises(UserError, match="maximum context length is 64 tokens"):
        engine.add("long", prompt(64), greedy())


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused(make_engine: MakeEngine) -> None:
    token = make_engine().ledger.kv_pool // make_engine().ledger.tokens
    with pytest.raises(
        UserError, match=r"max_model_len 100 is more than the 64 tokens .* lower it to 64"
    ) as e:
        make_engine(num_kv_blocks=None, kv_cache_memory_bytes=64 * token, max_model_len=100)
    assert e.value.parameter == "max_model_len"
    assert make_engine(num_kv_blocks=None, kv_cache_memory_bytes=64 * token, max_model_len=64)


def test_s05_preemption_keeps_output(make_engine: MakeEngine, generate: Generate) -> None:
    prompts = [prompt(20, seed) for seed in range(4)]
    ample = generate(make_engine(), prompts, greedy(64))
    for caching in (True, False):
        engine = make_engine(num_kv_blocks=9, enable_prefix_caching=caching)
        for i, ids in enumerate(prompts):
            engine.add(str(i), ids, greedy(64))
        texts = dict.fromkeys("0123", "")
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            for output in engine.step():
                new = output.outputs[0].text
                assert new.startswith(texts[output.request_id])
                texts[output.request_id] = new
                outputs[output.request_id] = output
        assert engine.stats().num_preemptions > 0
        assert sum(o.metrics.num_preemptions for o in outputs.values()) == engine.stats().num_preemptions
        for i in "0123":
            assert tokens(outputs, i) == tokens(ample, i)
            assert len(tokens(outputs, i)) == outputs[i].metrics.num_generation_tokens == 64
            assert texts[i] == ample[i].outputs[0].text


@pytest.mark.parametrize("family", ["llama3", "gemma2", "mistral"])
def test_s10_chunk_sizes_change_nothing(family: str, make_engine: MakeEngine, generate: Generate) -> None:
    expected_tokens, expected_logits = None, None
    for size in (64, 50, 49, 16, 7):
        engine = make_engine(family, max_num_batched_tokens=size, max_num_seqs=4)
        logits = torch.cat(list(engine.prompt_logits(prompt(50), rows=13)))
        out = tokens(generate(engine, [prompt(50)], greedy(32)))
        if expected_tokens is None:
            expected_tokens, expected_logits = out, logits
        assert (logits - expected_logits).abs().max() < 1e-4
        assert out == expected_tokens


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_s11_multiples_of_page_and_chunk_warm_as_cold(
    length: int, make_engine: MakeEngine, generate: Generate
) -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=4)
    cold = generate(engine, [prompt(length)], greedy(4))
    warm = generate(engine, [prompt(length)], greedy(4))
    assert cold["0"].num_cached_tokens == 0
    assert warm["0"].num_cached_tokens == (length - 1) // 16 * 16
    assert tokens(warm) == tokens(cold)


def test_s13_an_id_in_use_is_refused_and_free_again_afterwards(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine = make_engine()
    engine.add("0", prompt(5), greedy(3))
    with pytest.raises(UserError, match="in use") as raised:
        engine.add("0", prompt(6), greedy(3))
    assert raised.value.parameter == "request_id"
    while engine.has_unfinished():
        stats = engine.stats()
        assert stats.num_running >= 0 <= stats.num_waiting
        engine.step()
    assert engine.stats()[:3] == (0, 0, 0.0)
    assert len(tokens(generate(engine, [prompt(5)], greedy(3)))) == 3


def test_s14_aborts_at_any_time_are_harmless(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine()
    expected = tokens(generate(make_engine(), [prompt(20)], greedy(8)))
    engine.add("other", prompt(20), greedy(8))
    engine.add("early", prompt(9), greedy(8))
    engine.abort("early")
    engine.step()
    engine.abort("early")
    engine.abort("unknown")
    engine.add("late", prompt(9), SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1))
    seen: list[int] = []
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                engine.abort(output.request_id)  # from the callback on the last token
            if output.request_id == "other":
                seen = list(output.outputs[0].token_ids)
            elif any(o.finished() or len(o.token_ids) == 2 for o in output.outputs):
                engine.abort("late")
    assert seen == expected
    assert engine.pages.num_free == engine.pages.num_pages
    engine.pages.check()


# --- section 2: KV cache and prefix cache


def test_k01_other_tokens_of_equal_low_bytes_are_no_hit(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine()
    generate(engine, [[65] * 17], greedy(4))
    second = generate(engine, [[321] * 17], greedy(4))
    assert second["0"].num_cached_tokens == 0
    off = generate(make_engine(enable_prefix_caching=False), [[321] * 17], greedy(4))
    assert tokens(second) == tokens(off)


def test_k04_whole_prompt_cached(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine()
    cold = generate(engine, [prompt(32)], greedy(8))
    again = generate(engine, [prompt(32)], greedy(8))
    longer = generate(engine, [[*prompt(32), 7]], greedy(8))
    assert [o["0"].num_cached_tokens for o in (cold, again, longer)] == [0, 16, 32]
    assert tokens(again) == tokens(cold)
    assert tokens(longer) == tokens(generate(make_engine(), [[*prompt(32), 7]], greedy(8)))


@pytest.mark.parametrize("length", [1, 15, 17, 40])
def test_k05_prompt_logprobs_are_complete_with_a_warm_cache(
    length: int, make_engine: MakeEngine, generate: Generate
) -> None:
    ids = prompt(length)
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=4)
    logits = torch.cat(list(engine.prompt_logits(ids))).double().log_softmax(-1)
    for _ in range(2):
        found = generate(engine, [ids], greedy(3, prompt_logprobs=1))["0"].prompt_logprobs
        assert found is not None
        assert len(found) == length
        assert found[0] is None
        for i, entry in enumerate(found[1:]):
            assert next(iter(entry)) == ids[i + 1]
            assert 1 <= len(entry) <= 2
            chosen = entry[ids[i + 1]]
            assert chosen.logprob == pytest.approx(logits[i, ids[i + 1]].item(), abs=1e-4)
            assert chosen.rank == int((logits[i] > logits[i, ids[i + 1]]).sum()) + 1
            assert max(entry.values()).logprob == pytest.approx(logits[i].max().item(), abs=1e-4)


def test_prompt_logprobs_survive_preemption_in_mid_prompt(
    make_engine: MakeEngine, generate: Generate
) -> None:
    params = [greedy(60), greedy(4, prompt_logprobs=0)]
    prompts = [prompt(4), prompt(150, 1)]
    tight = make_engine(num_kv_blocks=12, max_num_batched_tokens=4, max_num_seqs=4, max_model_len=190)
    outputs = generate(tight, prompts, params)
    assert tight.stats().num_preemptions > 0
    expected = generate(make_engine(), prompts, params)
    for got, want in zip(outputs["1"].prompt_logprobs[1:], expected["1"].prompt_logprobs[1:], strict=True):
        assert list(got) == list(want)
        assert next(iter(got.values())).logprob == pytest.approx(next(iter(want.values())).logprob, abs=1e-4)


def test_k07_bfloat16_differs_only_at_near_ties(
    load_tiny: Callable[..., Any], make_engine: MakeEngine, generate: Generate
) -> None:
    decoder, tokenizer = load_tiny("llama3", dtype="bfloat16")
    engine = Engine(decoder, tokenizer, EngineOptions(num_kv_blocks=64))
    cold = tokens(generate(engine, [prompt(40)], greedy(24)))
    warm = tokens(generate(engine, [prompt(40)], greedy(24)))
    split = next((i for i, (a, b) in enumerate(zip(cold, warm, strict=True)) if a != b), None)
    whole = torch.cat(list(engine.prompt_logits([*prompt(40), *cold])))
    small = Engine(
        decoder, tokenizer, EngineOptions(num_kv_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
    )
    chunked = torch.cat(list(small.prompt_logits([*prompt(40), *cold])))
    shift = (whole - chunked).abs().max()
    assert shift <= 0.02 * whole.abs().max()
    if split is not None:
        top = whole[39 + split].topk(2).values
        assert top[0] - top[1] < 2 * shift


@pytest.mark.parametrize("kv", ["int8", "fp8", "bfloat16"])
def test_k10_quantized_cache_with_prefix_caching(
    kv: str, make_engine: MakeEngine, generate: Generate
) -> None:
    engine = make_engine(kv_cache_dtype=kv, num_kv_blocks=300)
    three = [tokens(generate(engine, [prompt(40)], greedy(12))) for _ in range(3)]
    assert three[0] == three[1] == three[2]
    many = generate(engine, [prompt(40)] * 64, greedy(12))
    assert all(tokens(many, str(i)) == three[0] for i in range(64))
    exact = torch.cat(list(make_engine().prompt_logits(prompt(40))))
    stored = torch.cat(list(engine.prompt_logits(prompt(40))))
    error = (exact - stored).norm() / exact.norm()
    assert 1e-5 < error < {"int8": 0.02, "fp8": 0.1, "bfloat16": 0.01}[kv]


def test_k11_unit_fp8_scales_are_said_aloud(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_engine(kv_cache_dtype="fp8")
    assert "saturate" in caplog.text
    caplog.clear()
    make_engine(kv_cache_dtype="fp8", kv_scales={0: (0.5, 0.5), 1: (0.25, 0.5)})
    assert caplog.text == ""


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_k13_invalid_scales_are_refused_by_name(bad: float, which: int, make_engine: MakeEngine) -> None:
    pair = [0.5, 0.5]
    pair[which] = bad
    with pytest.raises(ValueError, match=rf"{'kv'[which]}_scale of layer 1 is {bad}"):
        make_engine(kv_cache_dtype="fp8", kv_scales={0: (0.5, 0.5), 1: tuple(pair)})


def test_nan_in_free_pages_reaches_nobody(make_engine: MakeEngine, generate: Generate) -> None:
    expected = generate(make_engine(), [prompt(20), prompt(33, 1)], greedy(20))
    engine = make_engine()
    for layer in engine.runner.pool.layers:
        layer.k.fill_(math.nan)
        layer.v.fill_(math.nan)
    outputs = generate(engine, [prompt(20), prompt(33, 1)], greedy(20))
    assert [tokens(outputs, i) for i in "01"] == [tokens(expected, i) for i in "01"]


# --- the same tokens


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_one_request_alone_and_among_fifteen_others(
    family: str, make_engine: MakeEngine, generate: Generate
) -> None:
    alone = tokens(generate(make_engine(family), [prompt(25)], greedy(40)))
    others = [prompt(3 + 5 * i, i) for i in range(1, 16)]
    for place in (0, 7):
        prompts = [*others[:place], prompt(25), *others[place:]]
        params = [greedy(10 + 3 * i) for i in range(16)]
        params[place] = greedy(40)
        engine = make_engine(family, max_num_batched_tokens=64, num_kv_blocks=200)
        assert tokens(generate(engine, prompts, params), str(place)) == alone


def test_prefix_cache_cold_warm_and_off(make_engine: MakeEngine, generate: Generate) -> None:
    off = tokens(generate(make_engine(enable_prefix_caching=False), [prompt(70)], greedy(30)))
    engine = make_engine()
    assert tokens(generate(engine, [prompt(70)], greedy(30))) == off
    assert tokens(generate(engine, [prompt(70)], greedy(30))) == off
    assert engine.stats().prefix_hits == 64
    assert engine.reset_prefix_cache()
    assert generate(engine, [prompt(70)], greedy(30))["0"].num_cached_tokens == 0


def test_salts_do_not_share_pages(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine()
    generate(engine, [prompt(40)], greedy(2), cache_salt="a")
    assert generate(engine, [prompt(40)], greedy(2), cache_salt="b")["0"].num_cached_tokens == 0
    assert generate(engine, [prompt(40)], greedy(2), cache_salt="a")["0"].num_cached_tokens == 32


# --- requests and their outputs


def test_n_sequences_share_the_prompt_and_differ(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine()
    params = SamplingParams(n=4, seed=5, max_tokens=12, ignore_eos=True)
    outputs = generate(engine, [prompt(40)], params)["0"].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    assert engine.stats().prefix_hits == 3 * 32
    single = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)  # seed + index
    assert tokens(generate(engine, [prompt(40)], single)) == list(outputs[2].token_ids)


def test_counters_are_exact(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine()
    generate(engine, [prompt(40), prompt(10, 1)], [greedy(5), greedy(3)])
    generate(engine, [prompt(40)], greedy(2))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens) == (90, 32, 10)
    assert (stats.prefix_queries, stats.prefix_hits, stats.kv_tokens) == (90, 32, 64 * 16)
    assert stats[:3] == (0, 0, 0.0)


def test_time_stamps_are_in_order(make_engine: MakeEngine, generate: Generate) -> None:
    metrics = generate(make_engine(max_num_seqs=1), [prompt(5), prompt(5)], greedy(3))["1"].metrics
    stamps = (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts)
    assert list(stamps) == sorted(stamps)
    assert metrics.first_token_latency >= stamps[2] - stamps[0] > 0


def test_outputs_are_cumulative_and_never_change_afterwards(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(5), greedy(4, logprobs=0))
    seen = []
    while engine.has_unfinished():
        seen += engine.step()
    assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3, 4]
    assert [len(output.outputs[0].logprobs) for output in seen] == [1, 2, 3, 4]
    assert [output.finished for output in seen] == [False, False, False, True]


def test_final_only_yields_one_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(5), greedy(4, output_kind=RequestOutputKind.FINAL_ONLY))
    seen = []
    while engine.has_unfinished():
        seen += engine.step()
    assert [len(output.outputs[0].token_ids) for output in seen] == [4]


def test_h02_a_prompt_as_long_as_the_context_is_refused_with_both_lengths(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=20)
    for length in (21, 20):
        with pytest.raises(UserError, match=rf"maximum context length is 20 .* {length}"):
            engine.add("a", prompt(length), greedy(1))
    engine.add("a", prompt(19), SamplingParams(max_tokens=10**6, temperature=0))
    (output,) = engine.step()
    assert output.finished
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("ids", [[-1], [384], [], [1, 99999]])
def test_p10_prompt_ids_out_of_range_are_refused(ids: list[int], make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(UserError) as raised:
        engine.add("a", ids, greedy())
    assert raised.value.parameter == "prompt"
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [384]),
        ("allowed_token_ids", [384]),
        ("logit_bias", {384: 1.0}),
        ("logprob_token_ids", [384]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 10**6),
    ],
)
def test_p09_p15_params_beyond_the_model_are_refused(name: str, value: Any, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(UserError) as raised:
        engine.add("a", prompt(5), greedy(8, min_tokens=5, **{name: value}))
    assert raised.value.parameter == name
    assert not engine.has_unfinished()


def test_p09_a_refused_request_leaves_its_neighbour_alone(
    make_engine: MakeEngine, generate: Generate
) -> None:
    expected = tokens(generate(make_engine(), [prompt(20)], greedy(8)))
    engine, seen = make_engine(), []
    engine.add("0", prompt(20), greedy(8))
    while engine.has_unfinished():
        with pytest.raises(UserError, match="stop_token_ids"):
            engine.add("bad", prompt(5), greedy(8, min_tokens=5, stop_token_ids=[151645]))
        for output in engine.step():
            seen = list(output.outputs[0].token_ids)
    assert seen == expected


def test_allowed_ids_that_may_all_be_forbidden_are_refused(make_engine: MakeEngine) -> None:
    params = SamplingParams(allowed_token_ids=[258], min_tokens=1)
    with pytest.raises(UserError, match="forbid"):
        make_engine().add("a", prompt(5), params)


def test_prompt_logits_need_an_idle_engine_and_give_their_pages_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    rows = engine.prompt_logits(prompt(30), rows=8)
    assert next(rows).shape == (8, 384)
    with pytest.raises(UserError, match="idle"):
        next(engine.prompt_logits(prompt(5)))
    rows.close()
    assert engine.pages.num_free == 64
    engine.add("a", prompt(5), greedy(2))
    with pytest.raises(UserError, match="idle"):
        next(engine.prompt_logits(prompt(5)))


def test_prompt_logits_are_those_that_requests_are_sampled_from(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine = make_engine()
    chosen = tokens(generate(engine, [prompt(30)], greedy(10)))
    logits = torch.cat(list(engine.prompt_logits([*prompt(30), *chosen], rows=7)))
    assert logits.dtype == torch.float32
    assert logits[29:-1].argmax(-1).tolist() == chosen


def test_every_step_has_a_token_per_sequence(make_engine: MakeEngine, generate: Generate) -> None:
    runner = FakeRunner(384, [70])
    engine = make_engine(runner=runner, max_num_batched_tokens=16, max_num_seqs=8)
    generate(engine, [prompt(n, n) for n in (1, 15, 16, 17, 32, 33)], greedy(4))
    assert all(0 < sum(c.stop - c.start for c in plan.chunks) <= 16 for plan in runner.plans)


def test_ledger_adds_up(make_engine: MakeEngine) -> None:
    ledger = make_engine().ledger
    total = ledger.weights + ledger.activations + ledger.graphs + ledger.reserve + ledger.kv_pool
    assert total == ledger.budget
    assert (ledger.pages, ledger.tokens) == (64, 1024)


def test_nan_logits_end_their_own_request_with_an_error(
    make_engine: MakeEngine, generate: Generate, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakeRunner):
        def run(self, plan: Any, token_ids: Any, keep: frozenset[int] = frozenset()) -> Any:
            out = super().run(plan, token_ids, keep)
            for row, chunk in enumerate([chunk for chunk in plan.chunks if chunk.sample]):
                if len(token_ids[chunk.seq_id]) == 12:  # the first and third, after two tokens
                    out.logits[row, 3] = math.nan
            return out

    engine = make_engine(runner=Broken(384, [70, 71, 72, 73]))
    params = [greedy(6, logprobs=1), greedy(6), SamplingParams(seed=1, max_tokens=6, logprobs=0)]
    outputs = generate(engine, [prompt(10), prompt(20), prompt(10)], params)
    for i in "02":
        assert outputs[i].outputs[0].finish_reason == "error"
        assert len(outputs[i].outputs[0].logprobs) == len(tokens(outputs, i)) == 2
    assert len(tokens(outputs, "1")) == 6
    assert "not numbers" in caplog.text


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_that_repeats_itself_may_be_ended(
    make_engine: MakeEngine, generate: Generate, overlaps: bool
) -> None:
    runner = FakeRunner(384, [65, 66, 67, 68, 67, 68, 67, 68, 69], overlaps=overlaps)
    repetition = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3)
    params = greedy(20, repetition_detection=repetition)
    (choice,) = generate(make_engine(runner=runner), [[10]], params)["0"].outputs
    assert (choice.token_ids, choice.finish_reason) == ([65, 66, 67, 68, 67, 68, 67, 68], "repetition")
