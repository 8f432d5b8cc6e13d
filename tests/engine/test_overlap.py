"""Booking one step late changes nothing that a user sees: a launched engine beside one that waits."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.engine import graphs
from qinfer.engine.buffers import StepBuffers
from qinfer.engine.engine import Engine
from qinfer.engine.graphs import StepGraphs
from qinfer.engine.inputs import Tables, step_arrays
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.engine.plan import Chunk, Shape, StepPlan, bucket, buckets, shape_of, shapes
from qinfer.engine.runner import Runner
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.testing import FakeRunner

VOCAB = 384
LoadTiny = Callable[..., Any]


def script(prompt: list[int]) -> list[int]:
    """What a sequence of that prompt says: any tokens, among them ends (256, 258)."""
    rng = random.Random(str(prompt))
    return [rng.choice((rng.randrange(32, 127), rng.randrange(VOCAB))) for _ in range(200)]


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def engine_of(load_tiny: LoadTiny) -> Callable[..., Engine]:
    decoder, tokenizer = load_tiny("llama3")

    def make(overlaps: bool, says: Any = script, **options: Any) -> Engine:
        runner = FakeRunner(VOCAB, says, overlaps=overlaps)
        return Engine(decoder, tokenizer, EngineOptions(**{"num_kv_blocks": 64, **options}), runner=runner)

    return make


def run(
    engine: Engine,
    requests: list[tuple[int, list[int], SamplingParams]],
    aborts: dict[str, int] | None = None,
    priorities: list[int] | None = None,
) -> dict[str, RequestOutput]:
    """Adds requests (the step in which they come, prompt, parameters) and steps to the end."""
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while engine.has_unfinished() or any(at >= step for at, _, _ in requests):
        for i, (at, prompt, params) in enumerate(requests):
            if at == step:
                engine.add(str(i), prompt, params, priority=priorities[i] if priorities else 0)
        for request_id, at in (aborts or {}).items():
            if at == step:
                engine.abort(request_id)
        for output in engine.step():
            before = outputs.get(output.request_id)
            assert before is None or not before.finished
            if before is not None:
                for old, new in zip(before.outputs, output.outputs, strict=True):
                    assert list(new.token_ids[: len(old.token_ids)]) == list(old.token_ids)
                    assert new.text.startswith(old.text)
            outputs[output.request_id] = output
        engine.pages.check([seq.pages for seq in engine.scheduler.running])
        step += 1
    assert engine.pages.num_free == engine.pages.num_pages
    assert (engine._roster.sequences, engine._roster.requests, engine._under_way) == ({}, {}, None)
    assert sorted(engine.scheduler._lanes) == list(range(engine.limits.max_num_seqs))
    return outputs


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(list(o.token_ids), o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in output.outputs]


params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    seed=st.integers(0, 99),
    max_tokens=st.integers(1, 60),
    min_tokens=st.sampled_from([0, 0, 0, 1]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    stop=st.lists(st.sampled_from(["a", "e", "th"]), max_size=1),
    logprobs=st.sampled_from([None, None, None, None, 1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.5]),
    bad_words=st.sampled_from([[], [], [], ["b"]]),
)


@settings(max_examples=40)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 70), st.integers(0, 3), params_of),
        min_size=1,
        max_size=8,
    ),
    aborts=st.dictionaries(st.integers(0, 7).map(str), st.integers(0, 20), max_size=2),
    priorities=st.lists(st.integers(-1, 1), min_size=8, max_size=8),
    num_pages=st.integers(9, 30),
    budget=st.integers(4, 64),
    caching=st.booleans(),
)
def test_outputs_are_those_of_an_engine_that_waits(
    engine_of: Callable[..., Engine],
    requests: list[tuple[int, int, int, SamplingParams]],
    aborts: dict[str, int],
    priorities: list[int],
    num_pages: int,
    budget: int,
    caching: bool,
) -> None:
    options = {
        "num_kv_blocks": num_pages,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 4,
        "enable_prefix_caching": caching,
        "scheduling_policy": "priority",
    }
    given_requests = [(at, prompt_of(length, seed), params) for at, length, seed, params in requests]
    late = run(engine_of(True, **options), given_requests, aborts, priorities)
    at_once = run(engine_of(False, **options), given_requests, aborts, priorities)
    for i, (at, _, _) in enumerate(given_requests):
        if str(i) in aborts and aborts[str(i)] >= at:
            continue  # how far it got is a matter of time
        assert told(late[str(i)]) == told(at_once[str(i)])


def test_a_padded_step_that_was_launched_ahead_has_the_same_tokens(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner of a GPU on a CPU, with padding, lanes and device-side tokens, but for graphs."""
    decoder, tokenizer = load_tiny("gemma3")
    options = EngineOptions(num_kv_blocks=24, max_num_seqs=7, max_num_batched_tokens=40)
    ahead, plain = (Engine(decoder, tokenizer, options) for _ in range(2))
    runner = ahead.runner
    assert isinstance(runner, Runner)
    runner.overlaps = True
    runner.buffers = StepBuffers(runner._tables, runner.limits, decoder.device)
    monkeypatch.setattr("qinfer.backend.runs_kernels", lambda: True)
    for layer in runner.pool.layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    requests = [
        (i % 5, prompt_of(1 + 9 * i, i), SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=30))
        for i in range(11)
    ]
    outputs = run(ahead, requests)
    assert ahead.stats().num_preemptions > 0
    assert {i: told(o) for i, o in outputs.items()} == {i: told(o) for i, o in run(plain, requests).items()}


class Recorded:
    """A CUDA graph that does its work again when it is replayed."""

    def capture_begin(self, pool: object) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.work()


def replaying(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The same, launched ahead by graphs of its steps, as on a GPU."""
    runner = engine.runner
    assert isinstance(runner, Runner)
    runner.overlaps = True
    runner.buffers = StepBuffers(runner._tables, runner.limits, runner.decoder.device)
    captured, greedy = StepGraphs._captured, StepGraphs.greedy

    def recorded(self: StepGraphs, work: Callable[[], torch.Tensor]) -> Any:
        graph, result = captured(self, work)
        graph.work = torch.inference_mode()(lambda: result.copy_(work()))
        return graph, result

    for name, value in (("CUDAGraph", Recorded), ("graph_pool_handle", tuple), ("stream", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: device)
    monkeypatch.setattr(graphs, "_reserved", lambda device: 0)
    monkeypatch.setattr(StepGraphs, "_captured", recorded)
    monkeypatch.setattr(
        StepGraphs, "greedy", lambda self, shape: greedy(self, shape).clone()
    )  # as to the host
    monkeypatch.setattr("qinfer.backend.runs_kernels", lambda: True)
    runner.graphs = graphs.capture(runner)
    return engine


def test_replayed_graphs_have_the_same_tokens(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured, over which tensors, and which graph is replayed for which step."""
    options = EngineOptions(num_kv_blocks=30, max_num_seqs=7, max_num_batched_tokens=256)
    ahead, plain = (Engine(*load_tiny("llama3"), options) for _ in range(2))
    requests = [
        (i % 5, prompt_of(1 + 9 * i, i), SamplingParams(temperature=0.7 * (i > 7), seed=i, max_tokens=30))
        for i in range(11)
    ]
    outputs = run(replaying(ahead, monkeypatch), requests)
    assert {i: told(o) for i, o in outputs.items()} == {i: told(o) for i, o in run(plain, requests).items()}


def test_n04_identical_prompts_are_equal_rows_of_a_graph(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=256)
    ahead, plain = (Engine(*load_tiny("llama3"), options) for _ in range(2))
    requests = [(0, prompt_of(19, 1), SamplingParams(temperature=0.0, max_tokens=20))] * 8
    first, *others = run(replaying(ahead, monkeypatch), requests).values()
    assert all(told(output) == told(first) for output in (*others, *run(plain, requests).values()))


@pytest.mark.parametrize("count", [8, 9, 16])
def test_n05_batches_at_and_above_the_largest_graph(
    count: int, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are graphs for as many sequences as may run: the others wait until one of them ends."""
    options = EngineOptions(num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=256)
    ahead, plain = (Engine(*load_tiny("llama3"), options) for _ in range(2))
    replaying(ahead, monkeypatch)
    replayed: list[Shape] = []
    replay = StepGraphs.replay
    monkeypatch.setattr(
        StepGraphs, "replay", lambda self, shape: replayed.append(shape) or replay(self, shape)
    )
    requests = [
        (0, prompt_of(3 + i, i), SamplingParams(temperature=0.0, max_tokens=9 + i % 8, ignore_eos=True))
        for i in range(count)
    ]
    outputs = run(ahead, requests)
    assert {i: told(o) for i, o in outputs.items()} == {i: told(o) for i, o in run(plain, requests).items()}
    assert replayed.count(Shape(8, 8)) >= 8
    assert max(shape.num_seqs for shape in replayed) == 8


def test_sizes_of_padded_steps() -> None:
    assert buckets(20) == [20, 16, 8, 4, 2, 1]
    assert buckets(300)[:6] == [300, 288, 272, 256, 248, 240]
    assert buckets(300)[-5:] == [16, 8, 4, 2, 1]
    for count in range(1, 301):
        assert count <= bucket(count, 300) < count + 16


@pytest.mark.parametrize(("max_num_seqs", "longest"), [(1, 1), (12, 100), (256, 8192), (1024, 8192)])
def test_every_small_step_has_a_shape_that_holds_it(max_num_seqs: int, longest: int) -> None:
    limits = StepLimits(4096, max_num_seqs, longest, 64)
    known = shapes(limits)
    assert known == sorted(set(known), reverse=True)
    for num_seqs in {1, 2, 16, 17, max_num_seqs} & set(range(max_num_seqs + 1)):
        size = bucket(num_seqs, max_num_seqs)
        assert shape_of(num_seqs, num_seqs, limits, decodes=True) == Shape(size, size)
        assert Shape(size, size) in known
        for num_tokens in range(num_seqs, longest + 1, 37):
            shape = shape_of(num_tokens, num_seqs, limits, decodes=False)
            if shape is None:
                assert num_tokens > max(min(1024, longest), min(2048, longest // 4))
                continue
            assert shape in known
            assert shape.num_tokens >= num_tokens
            assert shape.num_tokens > shape.num_seqs >= num_seqs


@pytest.mark.parametrize("small", [0, 4096])
def test_cleared_buffers_suit_every_shape(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of 190 tokens left would be rows beyond the end of a smaller step."""
    # whole rows of the table arrive, or some of each
    monkeypatch.setattr("qinfer.engine.buffers._SMALL", small)
    limits = StepLimits(256, 12, 8192, 16)
    tables = Tables(limits)
    buffers = StepBuffers(tables, limits, torch.device("cpu"))
    chunks = Chunk(0, 0, 189, True, 3), Chunk(1, 5, 6, True, 4, True)
    plan = StepPlan(chunks, {3: range(1, 13), 4: [14]})
    buffers.fill(step_arrays(plan, {0: [7] * 189}, tables), None, Shape(192, 12))
    left = buffers.inputs(Shape(192, 12), 2)
    assert left.batch.query_starts.tolist() == [0, 189] + [190] * 11
    assert left.batch.seq_lens.tolist() == [189, 6] + [0] * 10
    assert left.sample_rows is not None
    assert left.sample_rows.tolist() == [188, 189]
    assert left.token_ids.tolist() == [7] * 189 + [-1] + [0] * 2
    assert left.lanes.tolist() == [3] * 189 + [4] + [12] * 2
    assert left.slots.tolist() == [*range(16, 16 + 189), 14 * 16 + 5, 0, 0]
    assert left.batch.page_table[:2, :12].tolist() == [[*range(1, 13)], [14] + [0] * 11]
    buffers.clear()
    for shape in shapes(limits):
        inputs = buffers.inputs(shape)
        assert not inputs.batch.query_starts.any()
        assert not inputs.batch.seq_lens.any()
        assert not inputs.slots.any()
        assert not inputs.batch.page_table.any()


def test_the_next_plan_is_made_before_the_tokens_are_known(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(True, [70, 71, 72, 73])
    engine.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))
    assert engine.step() == []
    seen = [[list(o.outputs[0].token_ids) for o in engine.step()] for _ in range(3)]
    assert seen == [[[70]], [[70, 71]], [[70, 71, 72]]]
    plans = engine.runner.plans
    assert [[(c.start, c.stop, c.pending) for c in plan.chunks] for plan in plans] == [
        [(0, 3, False)],
        [(3, 4, True)],
        [(4, 5, True)],  # and none for what max_tokens rules out
    ]


def test_the_step_after_an_end_is_dropped_and_its_pages_serve_others(
    engine_of: Callable[..., Engine],
) -> None:
    engine = engine_of(True, [70, 71, 258, 73], num_kv_blocks=4)
    outputs = run(engine, [(0, prompt_of(30, i), SamplingParams(temperature=0.0)) for i in range(3)])
    for output in outputs.values():
        assert list(output.outputs[0].token_ids) == [70, 71, 258]
        assert output.outputs[0].finish_reason == "stop"
    extra = [c for plan in engine.runner.plans for c in plan.chunks if c.start == 32]
    assert [chunk.pending for chunk in extra] == [True] * 3  # the end's own step, in vain
    assert engine.stats().generation_tokens == 9


def test_who_looks_back_is_booked_at_once(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(True, [70, 71, 72, 73])
    engine.add("plain", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6))
    engine.step()
    engine.add("told", [4, 5], SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    engine.step()
    for plan in engine.runner.plans[1:]:
        assert all(not chunk.pending for chunk in plan.chunks if chunk.seq_id == 1)
    while engine.has_unfinished():
        engine.step()
    assert [c.pending for plan in engine.runner.plans for c in plan.chunks if c.seq_id == 1] == [False] * 3


def test_a_full_page_of_the_last_known_token_is_found_again(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(True, [65 + i for i in range(26)])
    params = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    first = run(engine, [(0, prompt_of(15, 0), params)])["0"].outputs[0]
    again = run(engine, [(0, [*prompt_of(15, 0), *first.token_ids, 5], params)])
    assert again["0"].num_cached_tokens == 32
