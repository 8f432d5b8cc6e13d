"""What calibration needs to know about the inputs of a layer's linears, gathered while the layer runs.

`GroupStats` keeps per channel the largest magnitude and the mean magnitude, exact over every token whatever
the batches look like. `LayerTap` is what a layer calls with the input of each of its groups; it updates the
statistics always, and keeps the inputs themselves only for the batches that the searches will run on.
Sequences are never padded, so every row counts.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class GroupStats:
    """Per-channel magnitudes of one group's input, float32 [K]; float64 inside the mean."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._absmax: Tensor | None = None
        self._abs_sum: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Takes in the rows of `x` [T, K]."""
        magnitude = x.abs()
        absmax, abs_sum = magnitude.amax(0).float(), magnitude.sum(0, dtype=torch.float32).double()
        self._absmax = absmax if self._absmax is None else torch.maximum(self._absmax, absmax)
        self._abs_sum = abs_sum if self._abs_sum is None else self._abs_sum + abs_sum
        self.num_tokens += x.shape[0]

    @property
    def absmax(self) -> Tensor:
        """max over the tokens of |x|, [K]."""
        assert self._absmax is not None, "no token has been seen"
        return self._absmax

    @property
    def mean(self) -> Tensor:
        """mean over the tokens of |x|, [K]."""
        assert self._abs_sum is not None, "no token has been seen"
        return (self._abs_sum / self.num_tokens).float()


class LayerTap:
    """Called by a layer with (group name, input [T, K]); `keep` says whether to keep the inputs now."""

    def __init__(self) -> None:
        self.stats: dict[str, GroupStats] = defaultdict(GroupStats)
        self.inputs: dict[str, list[Tensor]] = defaultdict(list)
        self.keep = False

    def __call__(self, group: str, x: Tensor) -> None:
        self.stats[group].update(x)
        if self.keep:
            self.inputs[group].append(x.detach().clone())
