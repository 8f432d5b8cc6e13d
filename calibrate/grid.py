"""The values that a scheme can store for a group of weights, and rounding to them without packing.

A search looks at dozens of versions of each weight and GPTQ rounds one column at a time; making file tensors
and reading them back would be most of their time. So the grid of each group, its step and zero, is made here
from a range, by the arithmetic that the scheme itself uses: values are those of
`scheme.dequantize(scheme.quantize(weight, ranges))`, bit for bit. Only the check for NaN is left out: weights
are checked when they are loaded, and a search passes over a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.quant import W4A16, Ranges, Scheme, W8A8Int8, W8A16Int8
from qinfer.quant.rounding import FP8_MAX, asymmetric_scale, symmetric_scale


class Grid(NamedTuple):
    """Values (code - zero) * step for codes from lowest to highest, or float8 * step where `bits` is 0.

    `step` and `zero` (None: symmetric) are float32 of one shape, an entry per group of weights.
    """

    step: Tensor
    zero: Tensor | None
    bits: int

    @classmethod
    def of(cls, scheme: Scheme, ranges: Ranges, dtype: torch.dtype) -> Grid:
        """The scheme's grids for ranges (low, high) of any one shape; `dtype` is that of stored scales."""
        if isinstance(scheme, W4A16) and not scheme.symmetric:
            scale, zero = asymmetric_scale(ranges, 4, dtype)
            return cls(scale.float(), zero.float(), 4)
        bits = 4 if isinstance(scheme, W4A16) else 8 if isinstance(scheme, W8A8Int8 | W8A16Int8) else 0
        steps = (2**bits - 1) / 2 if bits else FP8_MAX
        return cls(symmetric_scale(ranges, steps, dtype).float(), None, bits)

    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest values, float32, to a float32 weight that `step` broadcasts with."""
        codes = weight / self.step
        if not self.bits:
            return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float().mul_(self.step)
        lowest = -(1 << (self.bits - 1))
        if self.zero is None:
            return codes.round_().clamp_(lowest, -lowest - 1).mul_(self.step)
        codes.add_(self.zero).round_().clamp_(lowest, -lowest - 1)
        return codes.sub_(self.zero).mul_(self.step)

    def map(self, change: Callable[[Tensor], Tensor]) -> Grid:
        """The grid with `change` applied to step and zero alike."""
        return Grid(change(self.step), None if self.zero is None else change(self.zero), self.bits)
