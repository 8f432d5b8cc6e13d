"""A linear as its quantized form computes it, for searches that look at dozens of versions of each weight.

Where only weights are quantized that is a dense linear with the values that would be read back (grid.py);
where inputs are quantized too, it is the scheme's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qinfer.calibrate.grid import Grid
from qinfer.model.linear import FileTensors
from qinfer.quant import W4A16, ActivationFormat, Dense, Ranges, Scheme, W8A8Fp8Static, W8A16Int8
from qinfer.quant.rounding import absmax_ranges


def as_read_back(
    scheme: Scheme, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
) -> Tensor:
    """The float32 weight [N, K] that the scheme's file tensors mean; `dtype` is that of stored scales."""
    if not isinstance(scheme, W4A16 | W8A16Int8):
        return scheme.dequantize(scheme.quantize(weight, ranges, dtype=dtype))
    groups = weight.shape[1] // scheme.group_size if isinstance(scheme, W4A16) else 1
    weight = weight.float()
    grid = Grid.of(scheme, ranges or absmax_ranges(weight, groups), dtype)
    parts = weight.view(len(weight), groups, -1)
    return grid.map(lambda x: x.unsqueeze(-1)).nearest(parts).flatten(-2)


def judged(scheme: Scheme, weight: Tensor, input_absmax: float, *, dtype: torch.dtype) -> FileTensors:
    """A linear that computes what the scheme's would: itself where inputs are quantized too, else dense.

    `input_absmax` is for a static scheme, whose inputs are no larger.
    """
    if scheme.activations is ActivationFormat.NONE:
        return Dense(), {"weight": as_read_back(scheme, weight, dtype=dtype)}
    tensors = scheme.quantize(weight, dtype=dtype)
    if isinstance(scheme, W8A8Fp8Static):
        tensors = scheme.with_input_range(tensors, input_absmax)
    return scheme, tensors


def dequantized(scheme: Scheme, tensors: Mapping[str, Tensor], weight: Tensor) -> FileTensors:
    """The same for file tensors that exist, whose weight has been read back."""
    return (Dense(), {"weight": weight}) if scheme.activations is ActivationFormat.NONE else (scheme, tensors)
