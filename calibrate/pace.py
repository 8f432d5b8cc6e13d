"""How long a quantize run will take: its work counted from shapes, at the speed this machine shows now.

Work is counted in products of activations (in their dtype), products of float32 (second moments, GPTQ),
passes over float32 weights (rounding, ranges), small operations that cost what it takes to begin one (GPTQ's
columns), and bytes that go through memory to a file. Each kind is timed on a small sample, which takes half
a second. What is counted are the loops of this package, so the counts are its own: a search walks through the
layer once per candidate, ranges are tried thirty times, GPTQ sweeps thrice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from qinfer.calibrate import awq, gptq, smoothquant
from qinfer.calibrate.layer import ERROR_TOKENS
from qinfer.calibrate.needs import Work
from qinfer.calibrate.ranges import CHUNKS, WIDTHS
from qinfer.checkpoint.checkpoint import CPU
from qinfer.checkpoint.names import layer_modules
from qinfer.quant import W4A16

_ROUND_PASSES = 12  # over a weight to quantize it and to read it back
_TRY_PASSES = 8  # over a weight for one width of its range
_STEP_PASSES = 10  # over a column of GPTQ for one step
_STEP_CALLS = 14  # to round a column and to tell the others
_ROUND_CALLS = 60  # to quantize a linear, to check it and to measure its errors
_TRY_CALLS = 12
_CANDIDATE_CALLS = 60  # to round a group and to run it
_COPIES = 4  # of file tensors: as gathered, as bytes, into the file, and into the shard
_CALLS = 200
_PROBE = {"cpu": 1024, "cuda": 8192}


class Pace(NamedTuple):
    """Operations a second.

    Products in the activations' dtype and in float32, passes over numbers, operations begun, bytes copied.
    """

    products: float
    float32: float
    passes: float
    calls: float
    copies: float


class Effort(NamedTuple):
    """The work of one layer in a Pace's units."""

    products: float
    float32: float
    passes: float
    calls: float
    copies: float

    def seconds(self, pace: Pace) -> float:
        """At this pace."""
        return sum(work / speed for work, speed in zip(self, pace, strict=True))


def measured_pace(dtype: torch.dtype, device: torch.device = CPU) -> Pace:
    """Of this device with its load of the moment."""
    size = _PROBE[device.type]
    a, b = torch.randn(2, size, size, device=device)
    low_a, low_b = a.to(dtype), b.to(dtype)
    tiny = torch.zeros(64, device=device)
    host = torch.zeros(1 << 22)
    copy = torch.empty_like(host)
    flops = 2.0 * size**3

    def begin() -> None:
        for _ in range(_CALLS):
            tiny.add_(1.0)

    return Pace(
        flops / _fastest(lambda: low_a @ low_b, device),
        flops / _fastest(lambda: a @ b, device),
        a.numel() / _fastest(lambda: a.add_(1.0), device),
        _CALLS / _fastest(begin, device),
        4 * len(host) / _fastest(lambda: copy.copy_(host), CPU),
    )


def effort(work: Work) -> Effort:
    """What one layer takes."""
    modules = len(layer_modules(work.config))
    passes = float(_ROUND_PASSES * work.layer_weights)
    calls = float(_ROUND_CALLS * modules)
    copies = float(work.layer_weights * work.storage + _COPIES * work.file_bytes_per_layer)
    if not work.tokens:
        return Effort(0.0, 0.0, passes, calls, copies)
    recipe = work.recipe
    copies += _moves(work) * work.stream_bytes
    products = _walk(work, work.tokens) * (2 if work.made_anew else 1)
    products += 2 * 2 * min(work.tokens, ERROR_TOKENS) * work.layer_weights
    float32 = 0.0
    if recipe.transform:
        products += _walk(work, work.tokens)
        searched, weights, candidates = _search(work)
        products += searched
        passes += weights * _ROUND_PASSES
        calls += candidates * _CANDIDATE_CALLS
    if recipe.ranges != "absmax":
        tries = len(WIDTHS) * (3 if isinstance(recipe.scheme, W4A16) and not recipe.scheme.symmetric else 1)
        passes += tries * _TRY_PASSES * work.layer_weights
        calls += tries * _TRY_CALLS * max(modules, work.layer_weights / CHUNKS[work.on_gpu])
        if isinstance(recipe.scheme, W4A16) and recipe.ranges == "output":
            size = recipe.scheme.group_size
            float32 += 2 * tries * size * work.layer_weights
            float32 += sum(2 * work.tokens * width * size for width in work.widths.values())
    effort = Effort(products, float32, passes, calls, copies)
    if not recipe.by_gptq:
        return effort
    return Effort(*(sum(both) for both in zip(effort, _gptq(work), strict=True)))


def _moves(work: Work) -> int:
    """How often a stream comes from where it waits or goes there: for every look at a group, and back."""
    if not work.made_anew:
        return 2  # into the journal
    return 2 + 2 * len(work.widths) + 2 + (1 if work.recipe.transform else 0)


def _walk(work: Work, tokens: int) -> float:
    """All tokens through the layer once."""
    config = work.config
    attention = 4 * work.length * config.num_heads * config.head_dim
    return float(tokens * (2 * work.layer_weights + attention))


def _search(work: Work) -> tuple[float, float, int]:
    """Products of all candidates, weights that they round, and how many there are."""
    weights, tokens = work.group_weights, work.searched
    attention = 4 * work.length * work.config.num_heads * work.config.head_dim
    used = {
        "qkv": 2 * (weights["qkv"] + weights["o"]) + attention,
        "o": 2 * weights["o"],
        "gate_up": 2 * sum(w for name, w in weights.items() if name.startswith(("gate_up", "down"))),
        "down": 2 * sum(w for name, w in weights.items() if name.startswith("down")),
    }
    if work.recipe.transform == "smoothquant":
        del used["o"]
    candidates = 1 + (awq.NUM_GRID if work.recipe.transform == "awq" else len(smoothquant.ALPHAS))
    rounded = sum(w for name, w in weights.items() if name.partition(".")[0] in used)
    products = candidates * tokens * sum(used.values())
    return float(products), float(candidates * rounded), candidates * len(used)


def _gptq(work: Work) -> Effort:
    """Second moments, their factors, and the sweeps over the columns."""
    products = float32 = passes = calls = 0.0
    rounds = 1 + gptq.SWEEPS
    for name, width in work.widths.items():
        rows = work.group_weights[name] // width
        products += work.tokens * width * width
        float32 += 2.0 * width**3 + 2.0 * rounds * rows * width * width
        passes += _STEP_PASSES * rounds * rows * width
        calls += _STEP_CALLS * rounds * width
    return Effort(products, float32, passes, calls, 0.0)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
