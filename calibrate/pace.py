"""How long a quantize run will take: its work counted from shapes, at the speed this machine shows now.

Work is counted in products of activations (in their dtype), products of float32 (second moments, GPTQ), and
passes over float32 weights that stay in the cache (rounding, ranges). Each kind of work is timed on a small
sample, which takes half a second. What is counted are the loops of this package, so the counts are its own:
a search walks through the layer once per candidate, ranges are tried thirty times, GPTQ sweeps thrice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from qinfer.calibrate import awq, gptq, smoothquant
from qinfer.calibrate.layer import ERROR_TOKENS
from qinfer.calibrate.needs import Work
from qinfer.calibrate.ranges import WIDTHS
from qinfer.quant import W4A16

_ROUND_PASSES = 12  # over a weight to quantize it and to read it back
_TRY_PASSES = 8  # over a weight for one width of its range
_STEP_PASSES = 10  # over a column of GPTQ for one step
_PROBE = 1024


class Pace(NamedTuple):
    """Operations a second: of products in the activations' dtype, in float32, of passes over numbers."""

    products: float
    float32: float
    passes: float


class Effort(NamedTuple):
    """The work of one layer in a Pace's units."""

    products: float
    float32: float
    passes: float

    def seconds(self, pace: Pace) -> float:
        """At this pace."""
        return sum(work / speed for work, speed in zip(self, pace, strict=True))


def measured_pace(dtype: torch.dtype) -> Pace:
    """Of this machine with its load of the moment."""
    a, b = torch.randn(_PROBE, _PROBE), torch.randn(_PROBE, _PROBE)
    low_a, low_b = a.to(dtype), b.to(dtype)
    flops = 2.0 * _PROBE**3
    return Pace(
        flops / _fastest(lambda: low_a @ low_b),
        flops / _fastest(lambda: a @ b),
        a.numel() / _fastest(lambda: a.add_(1.0)),
    )


def effort(work: Work) -> Effort:
    """What one layer takes."""
    rounding = float(_ROUND_PASSES * work.layer_weights)
    if not work.tokens:
        return Effort(0.0, 0.0, rounding)
    recipe = work.recipe
    products = _walk(work, work.tokens)
    products += 2 * 2 * min(work.tokens, ERROR_TOKENS) * work.layer_weights
    float32 = passes = 0.0
    if recipe.transform:
        products += _walk(work, work.tokens)
        searched, weights = _search(work)
        products += searched
        passes += weights * _ROUND_PASSES
    if recipe.ranges != "absmax":
        tries = len(WIDTHS) * (3 if isinstance(recipe.scheme, W4A16) and not recipe.scheme.symmetric else 1)
        passes += tries * _TRY_PASSES * work.layer_weights
        if isinstance(recipe.scheme, W4A16) and recipe.ranges == "output":
            size = recipe.scheme.group_size
            float32 += 2 * tries * size * work.layer_weights
            float32 += sum(2 * work.tokens * width * size for width in work.widths.values())
    if recipe.by_gptq:
        more = _gptq(work)
        float32 += more.float32
        passes += more.passes
        products += more.products
    return Effort(products, float32, passes + rounding)


def _walk(work: Work, tokens: int) -> float:
    """All tokens through the layer once."""
    config = work.config
    attention = 4 * work.length * config.num_heads * config.head_dim
    return float(tokens * (2 * work.layer_weights + attention))


def _search(work: Work) -> tuple[float, float]:
    """Products of all candidates, and weights that they round."""
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
    return float(candidates * tokens * sum(used.values())), float(candidates * rounded)


def _gptq(work: Work) -> Effort:
    """Second moments, their factors, and the sweeps over the columns."""
    products = float32 = passes = 0.0
    for name, width in work.widths.items():
        rows = work.group_weights[name] // width
        products += work.tokens * width * width
        float32 += 2.0 * width**3 + 2.0 * (1 + gptq.SWEEPS) * rows * width * width
        passes += _STEP_PASSES * (1 + gptq.SWEEPS) * rows * width
    return Effort(products, float32, passes)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
