"""CUDA graphs of small steps: a step's hundreds of launches as one.

A step of few tokens takes little time on the device, and to launch its kernels one by one takes the host
longer. A graph holds them all with their arguments. So its inputs lie at fixed places (`buffers.py`), and
there is one graph for every padded shape (`plan.shapes`). Nothing in a step depends on lengths but contents
of tensors: the attention's work is cut on the device.

Graphs share one pool of memory, and the largest is captured first, so that the others find room in what it
took: they never run at the same time. A graph ends with hidden states; logits and sampling follow by ordinary
launches, because what is asked for differs from step to step, and logits of every size would have to be kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer.engine.budget import measured_use
from qinfer.engine.plan import Shape, shapes

if TYPE_CHECKING:
    from qinfer.engine.runner import Runner


class StepGraphs:
    """Captured steps of some shapes; `num_bytes` of device memory went into them."""

    def __init__(self, graphs: dict[Shape, torch.cuda.CUDAGraph], hidden: Tensor, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._graphs = graphs
        self._hidden = hidden

    def replay(self, shape: Shape) -> Tensor:
        """Runs the step whose inputs are in the buffers -> hidden states [T, H], good until the next."""
        self._graphs[shape].replay()
        return self._hidden[: shape.num_tokens]


def capture(runner: Runner, of: Sequence[Shape] | None = None) -> StepGraphs | None:
    """Graphs of steps of some shapes, all if None; the runner's kernels must be compiled.

    `runner.graphs` is left as it was. The bytes are what the device's free memory lost: whoever asks for
    some shapes only can tell from them what all will take. None where the runner does not pad its steps.
    """
    if runner.buffers is None:
        return None
    runner.buffers.clear()
    of = shapes(runner.limits) if of is None else of
    decoder, device = runner.decoder, runner.decoder.device
    longest = max(of).num_tokens
    hidden = torch.empty(longest, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
    free = _free_memory(device)
    graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
    pool, stream = torch.cuda.graph_pool_handle(), _capture_stream(device)
    # torch.cuda.graph would empty the caches of memory before each: seconds for some dozens
    with torch.inference_mode(), torch.cuda.stream(stream):
        for shape in tqdm(of, "capturing graphs", delay=1.0, leave=False):
            inputs = runner.buffers.inputs(shape)
            runner.forward(inputs)  # whatever is made at first use is made outside
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            hidden[: shape.num_tokens].copy_(runner.forward(inputs))
            graph.capture_end()
            graphs[shape] = graph
    num_bytes = measured_use(free, _free_memory(device)) + hidden.nbytes
    return StepGraphs(graphs, hidden, num_bytes)


def why_it_waits(runner: Runner) -> str | None:
    """Tries a padded step in torch's mode in which an operation that waits for the device raises.

    None where nothing waits. What waits cannot be captured: some op has no kernel for this model.
    """
    assert runner.buffers is not None
    runner.buffers.clear()
    inputs = runner.buffers.inputs(min(shapes(runner.limits)))
    runner.forward(inputs)  # what is made at first use may wait
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not notice every way to wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward(inputs)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream that it ever saw."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _free_memory(device: torch.device) -> int:
    """Free bytes of the device when torch keeps none for itself."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
