"""From weights to scales and codes: the arithmetic that all integer and float8 schemes share.

A scale is first rounded to the dtype in which the checkpoint stores it and only then used: every reader then
computes with the scale that the codes were made for. It is never below the smallest normal number of that
dtype, because a scale that underflows to zero divides by zero here and gives NaN there.

Integers, b bits, codes from -2^(b-1) to 2^(b-1)-1, as compressed-tensors defines them:
  symmetric    scale = absmax / ((2^b - 1) / 2); the lowest code is in use, +absmax clips by half a step
  asymmetric   scale = (high - low) / (2^b - 1) with low <= 0 <= high, zero = round(-2^(b-1) - low / scale)
  code = clamp(round(w / scale + zero)), value = (code - zero) * scale; round is half to even
float8 e4m3fn: scale = absmax / 448, clamped to +-448 before the cast (casts may overflow to NaN).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.errors import CheckpointError

FP8_MAX = 448.0  # of torch.float8_e4m3fn

Ranges = tuple[Tensor, Tensor]  # (low, high), each [N, groups]


def finite_float32(weight: Tensor) -> Tensor:
    """The weight in float32; raises CheckpointError if it holds NaN or infinity: no format stores them."""
    weight = weight.float()
    num_bad = int((~torch.isfinite(weight)).sum())
    if num_bad:
        shape = list(weight.shape)
        raise CheckpointError(
            f"weight {shape} holds {num_bad} values that are NaN or infinite and cannot be quantized"
        )
    return weight


def absmax_ranges(weight: Tensor, groups: int) -> Ranges:
    """Lowest and highest value of each of `groups` equal parts of a row: [N, K] -> two of [N, groups]."""
    parts = _grouped(weight, groups)
    return parts.amin(-1), parts.amax(-1)  # four times as fast as aminmax


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 scale, rounded to the dtype of the file and kept within its normal numbers."""
    limits = torch.finfo(dtype)
    return scale.clamp(limits.tiny, limits.max).to(dtype)


def symmetric_scale(ranges: Ranges, steps: float, dtype: torch.dtype) -> Tensor:
    """Scale [N, groups] in `dtype` such that the larger magnitude of the range is `steps` steps from zero."""
    low, high = ranges
    return stored_scale(torch.maximum(low.abs(), high.abs()).float() / steps, dtype)


def asymmetric_scale(ranges: Ranges, num_bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale in `dtype` and zero point int8, both [N, groups]; the range is widened to hold zero."""
    low, high = ranges[0].float().clamp(max=0), ranges[1].float().clamp(min=0)
    lowest = -(2 ** (num_bits - 1))
    scale = stored_scale((high - low) / (2**num_bits - 1), dtype)
    zero_point = (lowest - low / scale.float()).round().clamp(lowest, -lowest - 1)
    return scale, zero_point.to(torch.int8)


def integer_codes(weight: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int) -> Tensor:
    """Codes int8 [N, K] of a float32 weight with scale (and zero point) [N, groups]."""
    lowest = -(2 ** (num_bits - 1))
    steps = _grouped(weight, scale.shape[-1]) / scale.float().unsqueeze(-1)
    if zero_point is not None:
        steps = steps + zero_point.unsqueeze(-1)
    return steps.round().clamp(lowest, -lowest - 1).to(torch.int8).flatten(-2)


def integer_values(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """float32 [N, K] that codes int8 [N, K] mean with scale (and zero point) [N, groups]."""
    steps = _grouped(codes.float(), scale.shape[-1])
    if zero_point is not None:
        steps = steps - zero_point.unsqueeze(-1)
    return (steps * scale.float().unsqueeze(-1)).flatten(-2)


def fp8_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn [N, K] of a float32 weight with scale [N, 1]."""
    return (weight / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _grouped(weight: Tensor, groups: int) -> Tensor:
    """[N, K] -> [N, groups, K / groups]."""
    return weight.reshape(weight.shape[0], groups, -1)
