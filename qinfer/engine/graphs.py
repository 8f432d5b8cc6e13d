"""CUDA graphs of small steps: a step's hundreds of launches as one.

A step of few tokens takes little time on the device, and to launch its kernels one by one takes the host
longer. A graph holds them all with their arguments. So its inputs lie at fixed places (`buffers.py`), and
there is one graph for every padded shape (`plan.shapes`). Nothing in a step depends on lengths but contents
of tensors: the attention's work is cut on the device.

Graphs share one pool of memory, and those that need most are captured first, so that the others find room in
what they took: they never run at the same time. These are the largest decode step, whose logits are one
tensor, then the largest of all. A graph ends with hidden states, because what follows differs from step
to step, and logits of every size would have to be kept. What follows a decode step of greedy sequences alone
is a second graph, down to their tokens; else logits and sampling are launched one by one.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer.engine.plan import Shape, shapes

if TYPE_CHECKING:
    from qinfer.engine.runner import Runner


class StepGraphs:
    """Captured steps of some shapes; they took `num_bytes` of torch's memory, and some of the driver's."""

    def __init__(self, hidden: Tensor) -> None:
        """`hidden` [S, H] is where results of the shape with most sequences have room."""
        self.num_bytes = 0
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._choices: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._hidden = hidden

    def add(self, runner: Runner, shape: Shape) -> None:
        """Captures the steps of one more shape, on the current stream."""
        assert runner.buffers is not None
        inputs = runner.buffers.inputs(shape)
        hidden = self._hidden[: shape.num_seqs]
        self._graphs[shape], _ = self._captured(lambda: hidden.copy_(runner.forward_padded(shape)))
        if shape.decodes:
            self._choices[shape] = self._captured(lambda: runner.choose(hidden, inputs))

    def replay(self, shape: Shape) -> Tensor:
        """Runs the step in the buffers -> hidden states of its sampled rows [S, H], good until the next."""
        self._graphs[shape].replay()
        return self._hidden[: shape.num_seqs]

    def greedy(self, shape: Shape) -> Tensor:
        """The likeliest tokens [S] after the decode step that was just replayed, good until the next."""
        graph, ids = self._choices[shape]
        graph.replay()
        return ids

    def _captured(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The work as a graph, and its result, which each replay makes anew in the same place."""
        work()  # whatever is made at first use is made outside
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        result = work()
        graph.capture_end()
        return graph, result


def capture(runner: Runner, of: Sequence[Shape] | None = None) -> StepGraphs | None:
    """Graphs of steps of some shapes, all if None; the runner's kernels must be compiled.

    `runner.graphs` is left as it was. None where the runner does not pad its steps.
    """
    if runner.buffers is None:
        return None
    runner.buffers.clear()
    of = shapes(runner.limits) if of is None else of
    widest = Shape(runner.limits.max_num_seqs, runner.limits.max_num_seqs)
    of = sorted(of, key=lambda shape: shape != widest)
    decoder, device = runner.decoder, runner.decoder.device
    most = max(shape.num_seqs for shape in of)
    hidden = torch.zeros(most, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
    graphs = StepGraphs(hidden)
    before = _reserved(device)
    # torch.cuda.graph would empty the caches of memory before each: seconds for some dozens
    with torch.inference_mode(), torch.cuda.stream(_capture_stream(device)), _no_collection():
        for shape in tqdm(of, "capturing graphs", delay=1.0, leave=False):
            graphs.add(runner, shape)
    graphs.num_bytes = _reserved(device) - before + hidden.nbytes
    return graphs


def why_it_waits(runner: Runner) -> str | None:
    """Tries a padded step in torch's mode in which an operation that waits for the device raises.

    None where nothing waits. What waits cannot be captured: some op has no kernel for this model.
    """
    assert runner.buffers is not None
    runner.buffers.clear()
    shape = min(shapes(runner.limits))
    runner.forward_padded(shape)  # what is made at first use may wait
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not notice every way to wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward_padded(shape)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects before, not within: graphs of an engine that is gone may not end during a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream that it ever saw."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch


def _reserved(device: torch.device) -> int:
    """Bytes that torch keeps for this process, none of them unused."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
