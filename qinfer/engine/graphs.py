"""CUDA graphs of decode steps: a step's some thousand launches as one.

A decode step takes little time on the device, and to launch its kernels one by one takes the host longer. A
graph holds them all with their arguments. So its inputs lie at fixed places (`inputs.DecodeBuffers`), and
there is one graph for every padded size (`inputs.buckets`). Nothing in a step depends on lengths but contents
of tensors: the attention's work is cut on the device.

Graphs share one pool of memory, and the largest is captured first, so that the others find room in what it
took: they never run at the same time. A graph ends with hidden states; logits and sampling follow by ordinary
launches, because what is asked for differs from step to step, and logits of every size would have to be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from qinfer.engine.inputs import buckets

if TYPE_CHECKING:
    from qinfer.engine.runner import Runner

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Captured decode steps of some sizes; `num_bytes` of device memory went into them."""

    def __init__(self, graphs: dict[int, torch.cuda.CUDAGraph], hidden: Tensor, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._graphs = graphs
        self._hidden = hidden

    def replay(self, size: int) -> Tensor:
        """Runs the step whose inputs are in the buffers -> hidden states [size, H], until the next replay."""
        self._graphs[size].replay()
        return self._hidden[:size]


def capture(runner: Runner, sizes: Sequence[int] | None = None) -> DecodeGraphs | None:
    """Graphs of decode steps of `sizes`, all buckets if None; the runner's kernels must be compiled.

    `runner.graphs` is left as it was. The bytes are what the device's free memory lost, whoever asks for
    some sizes only can tell from them what all will take. None, and said aloud, where a step of this model
    has to wait for the device, which a graph cannot.
    """
    assert runner.buffers is not None
    sizes = buckets(runner.limits.max_num_seqs) if sizes is None else sizes
    device = runner.decoder.device
    config = runner.decoder.config
    hidden = torch.empty(max(sizes), config.hidden_size, dtype=runner.decoder.dtype, device=device)
    free = _free_memory(device)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    with torch.inference_mode():
        if not _never_waits(runner, min(sizes)):
            return None
        for size in tqdm(sizes, "capturing graphs", delay=1.0, leave=False):
            inputs = runner.buffers.inputs(size)
            runner.forward(inputs)  # whatever is made at first use is made outside
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden[:size].copy_(runner.forward(inputs))
            graphs[size] = graph
    return DecodeGraphs(graphs, hidden, free - _free_memory(device) + hidden.nbytes)


def _never_waits(runner: Runner, size: int) -> bool:
    """Tries a step in torch's mode in which an operation that waits for the device raises."""
    assert runner.buffers is not None
    inputs = runner.buffers.inputs(size)
    runner.forward(inputs)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.forward(inputs)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        logger.warning("no CUDA graphs: a step of this model waits for the device (%s)", error)
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def _free_memory(device: torch.device) -> int:
    """Free bytes of the device when torch keeps none for itself."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
