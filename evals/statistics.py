"""Intervals for means over tokens that are not independent of each other.

Tokens of one window share a context, so a window, not a token, is the unit that is resampled (cluster
bootstrap; Efron and Tibshirani 1993, ch. 8). A mean over tokens is the ratio of two sums over windows, and
both are resampled together, so windows may differ in length. Reference and candidate see the same tokens:
every value here is already a paired difference, which is what makes a few thousand tokens enough.

Percentile intervals are too narrow when clusters are few; the levels are widened by Student's t as in
Hesterberg 2015 ("expanded percentile interval"). NaN anywhere gives NaN everywhere, and with fewer than two
clusters the interval is unbounded: neither can be mistaken for evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CONFIDENCE = 0.90  # two-sided: each bound is a one-sided 95 % bound, the one a non-inferiority test uses
RESAMPLES = 10_000
QUANTILE_RESAMPLES = 1_000  # each one weighs every token, not every window


class Interval(NamedTuple):
    """An estimate with its two-sided confidence bounds."""

    value: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the estimate."""
        return Interval(function(self.value), function(self.low), function(self.high))


def mean_interval(clusters: Sequence[Tensor], *, seed: int = 0, confidence: float = CONFIDENCE) -> Interval:
    """Mean over all values of all clusters (1-d tensors) with its interval; deterministic in the seed."""
    sums = torch.stack([values.double().sum() for values in clusters]) if clusters else torch.empty(0)
    counts = torch.tensor([values.numel() for values in clusters], dtype=torch.float64)
    value = float(sums.sum() / counts.sum())
    if len(clusters) < 2:
        return Interval(value, -math.inf, math.inf)
    weights = resampled(len(clusters), RESAMPLES, seed)
    return percentiles(value, (weights @ sums) / (weights @ counts), len(clusters), confidence)


def quantile_interval(
    clusters: Sequence[Tensor], q: float, *, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """The smallest value that at least a share `q` of all values does not exceed, with its interval."""
    values = torch.cat([values.double() for values in clusters]) if clusters else torch.empty(0)
    if values.numel() == 0 or not bool(torch.isfinite(values).all()):
        return Interval(math.nan, math.nan, math.nan)
    values, order = values.sort()
    owner = torch.cat([torch.full((len(c),), i) for i, c in enumerate(clusters)])[order]
    value = _weighted_quantile(values, torch.ones(1, len(values), dtype=torch.float64), q)
    if len(clusters) < 2:
        return Interval(float(value), -math.inf, math.inf)
    weights = resampled(len(clusters), QUANTILE_RESAMPLES, seed)
    # in slices of 50 resamples: weights of every token are [50, tokens], not [1000, tokens]
    drawn = [_weighted_quantile(values, part[:, owner], q) for part in torch.split(weights, 50)]
    return percentiles(float(value), torch.cat(drawn), len(clusters), confidence)


def exponential(nats: float) -> float:
    """e^nats, infinity where that is no float any more: a ruined model's perplexity is an honest infinity."""
    return math.inf if nats > 700 else math.exp(nats)


def finite(number: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return number if math.isfinite(number) else None


def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t (Cornish-Fisher, third order; within 1 % for p = 0.95 from 3 degrees on)."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / degrees ** (k + 1) for k, term in enumerate(terms)))


def resampled(num_clusters: int, resamples: int, seed: int) -> Tensor:
    """How often each cluster is drawn, [resamples, clusters] float64; each row sums to the clusters."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_clusters, (resamples, num_clusters), generator=generator)
    weights = torch.zeros(resamples, num_clusters, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))


def multinomial(draws: int, shares: np.ndarray, seed: int) -> np.ndarray:
    """How often each of K kinds is drawn, [RESAMPLES, K]: clusters of few kinds need no other draw."""
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = max(1, 2_000_000 // len(shares))  # numbers at a time
    parts = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([generator.multinomial(draws, shares, size=part) for part in parts])


def percentiles(value: float, drawn: Tensor, num_clusters: int, confidence: float = CONFIDENCE) -> Interval:
    """The interval of `value` from its resampled values [R], widened for few clusters."""
    tail = (1 - confidence) / 2
    t = student_quantile(1 - tail, num_clusters - 1)
    tail = NormalDist().cdf(-math.sqrt(num_clusters / (num_clusters - 1)) * t)
    low, high = torch.quantile(drawn, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(value, low, high)


def _weighted_quantile(values: Tensor, weights: Tensor, q: float) -> Tensor:
    """Per row of weights [R, n] over sorted values [n]: the first value with a share >= q at or below it."""
    reached = weights.cumsum(1)
    wanted = (q * reached[:, -1:]).clamp(min=0)
    return values[torch.searchsorted(reached, wanted).squeeze(1).clamp(max=len(values) - 1)]
