"""Sampling without a sort against the bytes it must read and against the way with torch.sort.

    python benchmarks/sampling.py [--out benchmarks/results/sampling-nvidia-h200.json]

Prints the copy bandwidth of this run first, then a table, then one JSON document. Times are medians of graph
replays; calls rotate over more logits than the L2 holds. Two kinds of logits: "normal" ones, of which top_p
0.9 keeps most of the vocabulary, and "zipf", where rank r has about r^-1.3 of the likeliest token's
probability, as in text. The floor is the time to read the logits once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from graph_timing import L2_TWICE, microseconds
from report import Row, run
from torch import Tensor

from qinfer.kernels import fused_sampling_triton

VOCAB = 128_256
BATCHES = (64, 1, 4, 16, 256)  # the first is the one with a target


def random_logits(kind: str, batch: int) -> Tensor:
    noise = torch.randn(batch, VOCAB, device="cuda")
    if kind == "normal":
        return noise
    ranks = torch.rand(batch, VOCAB, device="cuda").argsort(1) + 1
    return 15 - 1.3 * ranks.log() + 0.5 * noise


def by_sorting(logits: Tensor, uniform: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """top_p as it is usually written: sort, softmax, cumulative sum, cut, draw among what is left."""
    values, tokens = (logits / temperature.unsqueeze(1)).sort(1, descending=True)
    probs = values.softmax(1)
    before = probs.cumsum(1) - probs
    mass = probs.masked_fill(before >= top_p.unsqueeze(1), 0.0).cumsum(1)
    place = torch.searchsorted(mass, uniform.float().unsqueeze(1) * mass[:, -1:], right=True)
    return tokens.gather(1, place.clamp_max(VOCAB - 1))


def ways(batch: int) -> dict[str, Callable[[Tensor], Any]]:
    """Each way to choose a token for each row of logits."""
    ops = fused_sampling_triton
    uniform = torch.rand(batch, device="cuda", dtype=torch.float64)
    temperature = torch.full((batch,), 0.8, device="cuda")
    top_k = torch.full((batch,), 50, device="cuda")
    top_p, min_p = torch.full((batch,), 0.9, device="cuda"), torch.full((batch,), 0.01, device="cuda")
    return {
        "greedy": ops.greedy,
        "torch.max": lambda x: x.max(1),
        "temperature": lambda x: ops.sample(x, uniform, temperature),
        "top_p": lambda x: ops.sample(x, uniform, temperature, top_p=top_p),
        "top_k, top_p, min_p": lambda x: ops.sample(x, uniform, temperature, top_k, top_p, min_p),
        "top_p by sorting": lambda x: by_sorting(x, uniform, temperature, top_p),
        "torch.sort alone": lambda x: x.sort(1, descending=True),
    }


def measure(kind: str, batch: int) -> dict[str, float]:
    """Microseconds of each way."""
    count = max(2, min(16, L2_TWICE // (4 * batch * VOCAB) + 1))
    sets = [random_logits(kind, batch) for _ in range(count)]
    slow = ("top_p by sorting", "torch.sort alone")
    return {
        name: microseconds([lambda x=x, f=f: f(x) for x in (sets[:4] if name in slow else sets)])
        for name, f in ways(batch).items()
    }


def calls() -> Iterator[Callable[[], Any]]:
    """Each kernel once."""
    for batch in BATCHES:
        logits = torch.zeros(batch, VOCAB, device="cuda")
        for name in ("greedy", "temperature", "top_p", "top_k, top_p, min_p"):
            yield partial(ways(batch)[name], logits)


def measured(copy: float) -> Iterator[Row]:
    for batch in BATCHES:
        floor = 4 * batch * VOCAB / copy / 1e6
        for kind in ("normal", "zipf"):
            found = measure(kind, batch)
            times = "  ".join(f"{name} {time:.1f}" for name, time in found.items())
            gain = found["top_p by sorting"] / found["top_p"]
            line = f"B{batch:<3} {kind:6} floor {floor:.1f} us: {times}; top_p {gain:.1f}x sorting"
            yield {"batch": batch, "vocab": VOCAB, "logits": kind, "floor_us": floor, **found}, line


if __name__ == "__main__":
    run(__doc__, calls, measured)
