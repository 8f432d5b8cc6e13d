"""Histograms as Prometheus counts them, and the bounds of those that a server keeps.

vLLM's bounds are what its dashboards expect; ours have finer ones below them, since a small quantized model
answers in a millisecond. Whoever promises a latency wants it to be a bound, so that the share of requests
within it can be read off: `Bounds.parse` takes them by family, for both names of a number.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from qinfer.errors import UserError

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_FINE = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075)


class Histogram:
    """Counts of observations up to each bound, their number and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last is beyond every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self, bounds: Sequence[float] | None = None) -> list[tuple[str, float]]:
        """Prometheus' buckets: (bound, observations up to it), at `bounds`, which must be among its own."""
        chosen = frozenset(self.bounds if bounds is None else bounds)
        assert chosen <= frozenset(self.bounds)
        buckets, total = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            total += count
            if bound in chosen:
                buckets.append((repr(float(bound)), float(total)))
        return [*buckets, ("+Inf", float(sum(self.counts)))]


class Bounds(NamedTuple):
    """Bounds of each family of histograms; seconds, but for `step_tokens` and `request_tokens`."""

    time_to_first_token: tuple[float, ...]
    inter_token_latency: tuple[float, ...]  # gaps between tokens, and their mean
    request_latency: tuple[float, ...]  # whole requests and their phases
    step_duration: tuple[float, ...]
    step_tokens: tuple[float, ...]
    request_tokens: tuple[float, ...]


class HistogramBounds(NamedTuple):
    """Ours, and those that vLLM's names are given, which are among them."""

    ours: Bounds
    vllm: Bounds


def settle_bounds(max_model_len: int, chosen: Mapping[str, tuple[float, ...]]) -> HistogramBounds:
    """The bounds of a server; `chosen` families (`parse_bounds`) have theirs under both names."""
    tokens = token_bounds(max_model_len)
    vllm = Bounds(FIRST_TOKEN, PER_TOKEN, LATENCY, PER_TOKEN, STEP_TOKENS, tokens)
    fine = {"time_to_first_token", "inter_token_latency", "step_duration"}
    ours = Bounds(
        *(_with_fine(bounds) if name in fine else bounds for name, bounds in vllm._asdict().items())
    )
    return HistogramBounds(ours._replace(**chosen), vllm._replace(**chosen))


def parse_bounds(text: str) -> dict[str, tuple[float, ...]]:
    """The families and bounds of a JSON object such as {"time_to_first_token": [0.1, 0.5]}.

    Raises UserError for what is no such object, an unknown family, or bounds that do not rise above zero.
    """
    name = "custom_histogram_buckets"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{name} must be a JSON object of lists by family, not {text!r:.100}", name)
    for family, bounds in found.items():
        if family not in Bounds._fields:
            raise UserError(f"{name}: no family {family!r:.50}; there are {', '.join(Bounds._fields)}", name)
        if not _rises(bounds):
            raise UserError(
                f"{name}: the bounds of {family} must be numbers that rise from above 0, "
                f"not {json.dumps(bounds):.100}",
                name,
            )
    return {family: tuple(map(float, bounds)) for family, bounds in found.items()}


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the context, in tokens."""
    bounds = [m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5)]
    return tuple(float(bound) for bound in bounds if bound <= max_model_len)


def _with_fine(bounds: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted({*bounds, *_FINE}))


def _rises(bounds: object) -> bool:
    if not isinstance(bounds, list) or not bounds:
        return False
    if not all(isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b) for b in bounds):
        return False
    return bounds[0] > 0 and all(low < high for low, high in pairwise(bounds))
