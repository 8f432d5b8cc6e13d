"""Timing on a GPU: calls in one replayed graph, and the bandwidth of a copy to hold them against."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import triton
from triton.testing import do_bench

L2_TWICE = 256 << 20  # bytes of inputs to rotate over, so that none is still in the L2


def origin() -> dict[str, str]:
    """Where and when figures were measured, the head of every document of results."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
    }


def microseconds(calls: list[Callable[[], Any]], replays: int = 15, settle: float = 0.0) -> float:
    """Median time of one of `calls`, all of them in one graph.

    settle: seconds of the same work before; at its power limit a GPU takes as long to find its clocks.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    begin = time.perf_counter()
    while time.perf_counter() < begin + settle:
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    del kept
    return sorted(times[1:])[len(times) // 2] * 1e3 / len(calls)


def copy_bandwidth() -> float:
    """TB/s of a large copy, counted once read and once written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    milliseconds = float(do_bench(lambda: target.copy_(source), return_mode="median"))
    return 2 * source.nbytes / milliseconds / 1e9
