"""Decode steps as CUDA graphs, launched ahead: the same bits as without, and never a wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from qinfer.engine.graphs import StepGraphs
from qinfer.engine.plan import Shape, buckets, shapes
from qinfer.llm import LLM
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 192,
    "num_kv_blocks": 64,
    "allow_ungated": True,
}
IDS = [(37 * i + 11) % 256 for i in range(200)]
PROMPTS = [IDS[i : i + 1 + 7 * i] for i in range(17)]  # more than run at once
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
LIMITED = SamplingParams(temperature=1.1, top_p=0.9, top_k=30, min_p=0.01, seed=4, max_tokens=25)
MIXED = [(GREEDY, DRAWN, LIMITED)[i % 3] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    root, made = tmp_path_factory.mktemp("graphs"), dict[str, Path]()

    def llm(family: str = "qwen2", dtype: str = "bfloat16", **options: Any) -> LLM:
        name = f"{family}-{dtype}"
        if name not in made:
            made[name] = tiny_model(family, root / name, dtype=dtype, **WIDE)
        return LLM(str(made[name]), **{**OPTIONS, **options})

    return llm


def told(llm: LLM, params: Any = GREEDY) -> list[tuple[Any, ...]]:
    return told_of(llm, PROMPTS[: len(params)] if isinstance(params, list) else PROMPTS, params)


def told_of(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[tuple[Any, ...]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def tokens(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    return [ids for ids, _, _ in told(llm, params)]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("params", [GREEDY, DRAWN, MIXED], ids=["greedy", "drawn", "mixed"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_same_bits_with_and_without_graphs_and_overlap(
    family: str, params: Any, make: Callable[..., LLM]
) -> None:
    graphs = make(family, enable_prefix_caching=False)
    eager = make(family, enable_prefix_caching=False, enforce_eager=True)
    assert (graphs.engine.runner.graphs is None, eager.engine.runner.graphs is None) == (False, True)
    assert told(graphs, params) == told(eager, params)
    # batches are composed alike where nobody waits for an end, which is seen a step later
    few = [p.clone() for p in (params if isinstance(params, list) else [params] * 12)[:12]]
    for each in few:
        each.ignore_eos = True
    launched = told(graphs, few)
    graphs.engine.runner.overlaps = False
    assert told(graphs, few) == launched


def test_every_size_is_captured_and_decode_steps_are_replayed(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Shape] = []
    replay = StepGraphs.replay

    def noted(self: StepGraphs, shape: Shape) -> torch.Tensor:
        replayed.append(shape)
        return replay(self, shape)

    monkeypatch.setattr(StepGraphs, "replay", noted)
    llm = make()
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    assert graphs.num_bytes > 0
    assert set(graphs._graphs) == set(shapes(llm.engine.limits))
    mixed = {Shape(n, 12) for n in (64, 128, 192)}
    assert {Shape(n, n) for n in (12, 8, 4, 2, 1)} | mixed == set(graphs._graphs)
    for count in (1, 2, 3, 5, 9):
        replayed.clear()
        outputs = llm.generate(PROMPTS[:count], GREEDY, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
        size = next(size for size in buckets(12)[::-1] if size >= count)
        assert mixed.isdisjoint(replayed) == (count == 1)  # whose prompt is one token, so it is decode
        assert replayed.count(Shape(size, size)) >= 30


def test_n04_identical_prompts_are_equal_rows_of_a_graph(make: Callable[..., LLM]) -> None:
    graphs, eager = (
        make(max_num_seqs=8, enable_prefix_caching=False, enforce_eager=each) for each in (False, True)
    )
    for prompt in PROMPTS[1:4]:
        expected = told_of(eager, [prompt] * 8)
        assert told_of(graphs, [prompt] * 8) == expected == expected[:1] * 8


@pytest.mark.parametrize("count", [8, 9, 16])
def test_n05_batches_at_and_above_the_largest_graph(count: int, make: Callable[..., LLM]) -> None:
    """There are graphs for as many sequences as may run; others wait."""
    graphs, eager = (
        make(max_num_seqs=8, enable_prefix_caching=False, enforce_eager=each) for each in (False, True)
    )
    assert max(graphs.engine.runner.graphs._choices) == Shape(8, 8)
    assert told_of(graphs, PROMPTS[:count]) == told_of(eager, PROMPTS[:count])


def test_same_tokens_alone_cold_warm_and_preempted_in_float32(make: Callable[..., LLM]) -> None:
    llm = make("qwen3", "float32")
    cold = tokens(llm)
    assert tokens(llm) == cold
    assert llm.engine.stats().prefix_hits > 0
    tight = make("qwen3", "float32", num_kv_blocks=8)
    assert tokens(tight) == cold
    assert tight.engine.stats().num_preemptions > 0
    for prompt, expected in list(zip(PROMPTS, cold, strict=True))[::4]:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert list(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize("kv", ["auto", "fp8", "int8"])
def test_nothing_is_read_that_nobody_wrote(kv: str, make: Callable[..., LLM]) -> None:
    clean, poisoned = make(kv_cache_dtype=kv), make(kv_cache_dtype=kv)
    for layer in poisoned.engine.runner.pool.layers:
        for tensor in (layer.k, layer.v, layer.k_scales, layer.v_scales):
            if tensor is not None and tensor.dtype != torch.int8:
                tensor.view(torch.uint8).fill_(0x7F) if tensor.itemsize == 1 else tensor.fill_(torch.nan)
    expected = tokens(clean)
    assert tokens(poisoned) == expected
    assert tokens(poisoned) == expected  # from pages that are used again


def test_a_step_never_waits_for_the_device(make: Callable[..., LLM]) -> None:
    llm = make()
    expected = told(llm, MIXED)
    llm.reset_prefix_cache()
    with no_waiting():
        assert told(llm, MIXED) == expected


def test_eager_steps_never_wait_either(make: Callable[..., LLM]) -> None:
    llm = make(enforce_eager=True)
    expected = told(llm)
    llm.reset_prefix_cache()
    with no_waiting():
        assert told(llm) == expected


def test_requests_that_look_back_among_others(make: Callable[..., LLM]) -> None:
    told_all = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    penalized = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True)
    params = [(GREEDY, told_all, penalized)[i % 3] for i in range(len(PROMPTS))]
    llm = make("qwen3", "float32")
    together = tokens(llm, params)
    for i in (0, 1, 2, 7, 8):
        alone = llm.generate([PROMPTS[i]], params[i], use_tqdm=False)[0].outputs[0]
        assert list(alone.token_ids) == together[i]
        assert alone.logprobs is None or len(alone.logprobs) == 12


def test_a_model_whose_steps_wait_runs_without_graphs(
    make: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    """Attention has no kernel for float32 queries over bfloat16 pages, and its meaning reads lengths."""
    llm = make("qwen3", "float32", kv_cache_dtype="bfloat16")
    assert "no CUDA graphs" in caplog.text
    assert (llm.engine.runner.graphs, llm.engine.runner.buffers) == (None, None)
    assert all(len(ids) == 40 for ids in tokens(llm))
