"""Product of `w8a8_fp8` on the CPU, which has no float8 arithmetic: codes widened, weights once, at load.

bfloat16 and float32 hold every float8 e4m3fn value exactly, so the products are those of the meaning and
both scales are applied to the sum. The price is memory: two bytes a weight with bfloat16 activations, else
four (float16 would overflow in sums of codes up to 448 * 448).

Widening float8 activations again is not vectorised: 16 rows of 1536 take 250 us through the cast and 54 us by
the arithmetic below, which gives the same values (one core of a Xeon with AMX). e4m3 has steps of 2^(e-3) for
numbers of exponent e, and of 2^-9 below 2^-6. Adding 1.5 * 2^(e+20), whose own steps are 2^(e-3), and taking
it away again rounds half to even.
"""

import torch
from torch import Tensor

from qinfer.kernels.linear_cpu import linear
from qinfer.kernels.quantize_per_token import FP8_MAX, SMALLEST_SCALE

# Constants are tensors of one element: a Python number doubles the price of calling a small op.
_FP8_MAX = torch.tensor([FP8_MAX], device="cpu")
_EXPONENT_BITS = torch.tensor([0x7F800000], dtype=torch.int32, device="cpu")
_SHIFT = torch.tensor([1.5 * 2**20], device="cpu")
_SMALLEST_NORMAL = 2.0**-6


def widen(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn [N, K] -> the same values in `wide_dtype(dtype)`."""
    return weight.to(wide_dtype(dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products are made in: bfloat16 where activations are bfloat16, else float32."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def float8_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> the codes of `fp8_per_token` as float32 [T, K], and scale float32 [T, 1]."""
    x = x.float()
    scale = x.abs().amax(-1, True).div_(_FP8_MAX).clamp_min_(SMALLEST_SCALE)
    return _rounded(x.div(scale)), scale


def _rounded(codes: Tensor) -> Tensor:
    """The float8 values nearest to float32 numbers of at most 448; their memory is used again."""
    power_of_two = codes.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    shift = power_of_two.clamp_min_(_SMALLEST_NORMAL).mul_(_SHIFT)
    return codes.add_(shift).sub_(shift)


def w8a8_fp8_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `widen`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    codes, scale = float8_values(x)
    return linear(codes.type_as(weight), weight).float().mul_(weight_scale).mul_(scale).type_as(x)


def w8a8_fp8_static_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor) -> Tensor:
    """As `w8a8_fp8_cpu`, with one scale for all of x, float32 [1]."""
    codes = _rounded(x.float().div(input_scale).clamp_(-FP8_MAX, FP8_MAX))
    y = linear(codes.type_as(weight), weight).float()
    return y.mul_(weight_scale).mul_(input_scale).type_as(x)
