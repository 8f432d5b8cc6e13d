"""What a quantized weight will be when it is read back, without packing it into the file's words.

A search looks at dozens of versions of each weight; packing and unpacking would be most of its time. The
values are those of `scheme.dequantize(scheme.quantize(...))`, bit for bit. Only the check for NaN is left
out: weights are checked when they are loaded, and a search passes over a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qinfer.model.linear import FileTensors
from qinfer.quant import W4A16, ActivationFormat, Dense, Ranges, Scheme, W8A16Int8
from qinfer.quant.rounding import absmax_ranges, asymmetric_scale, symmetric_scale


def as_read_back(
    scheme: Scheme, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
) -> Tensor:
    """The float32 weight [N, K] that the scheme's file tensors mean; `dtype` is that of stored scales."""
    if isinstance(scheme, W4A16):
        bits, groups, symmetric = 4, weight.shape[1] // scheme.group_size, scheme.symmetric
    elif isinstance(scheme, W8A16Int8):
        bits, groups, symmetric = 8, 1, True
    else:
        return scheme.dequantize(scheme.quantize(weight, ranges, dtype=dtype))
    weight = weight.float()
    ranges = ranges or absmax_ranges(weight, groups)
    lowest = -(2 ** (bits - 1))
    if symmetric:
        scale, zero = symmetric_scale(ranges, (2**bits - 1) / 2, dtype), None
    else:
        scale, zero_point = asymmetric_scale(ranges, bits, dtype)
        zero = zero_point.float().unsqueeze(-1)
    step = scale.float().unsqueeze(-1)
    codes: Tensor = weight.view(weight.shape[0], groups, -1) / step
    codes = (codes if zero is None else codes.add_(zero)).round_().clamp_(lowest, -lowest - 1)
    return (codes if zero is None else codes.sub_(zero)).mul_(step).flatten(-2)


def judged(
    scheme: Scheme, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
) -> FileTensors:
    """A linear that computes what the scheme's would: itself where inputs are quantized too, else dense."""
    if scheme.activations is ActivationFormat.NONE:
        return Dense(), {"weight": as_read_back(scheme, weight, ranges, dtype=dtype)}
    return scheme, scheme.quantize(weight, ranges, dtype=dtype)


def dequantized(scheme: Scheme, tensors: Mapping[str, Tensor], weight: Tensor) -> FileTensors:
    """`judged` for file tensors that exist, whose weight has been read back."""
    return (Dense(), {"weight": weight}) if scheme.activations is ActivationFormat.NONE else (scheme, tensors)
