"""Integer product of `w8a8_int8` on the CPU: oneDNN's int8 x int8 through `_int_mm`, where it is fast.

It reads the weight as it lies in the file, so a weight takes one byte and nothing is prepared. oneDNN's
quantized linear with prepacked weights was tried: measured in the steps of a model of 30 layers (two cores of
a Xeon with AMX) a step took 1.2 to 1.5 times as long at 1 to 16 rows, and about the same at 512. Its calls
took 80 us alone and 150 to 190 us within a step. One row of bfloat16 has a way of its own, `int8_row_cpu`.

With few rows, time goes to calling ops, not to arithmetic: a call with a tensor costs 1.7 us, the same
call with a Python number or mixed dtypes 3.4 us, `.to(dtype)` 3 us where `.char()` costs 1.8. Hence constants
are tensors of one element, and rounding is one addition: float32 numbers from 2^23 to 2^24 are the integers,
so x + 1.5 * 2^23 is rounded half to even, and the low byte of its bits is the code in two's complement.
"""

import torch
from torch import Tensor

from qinfer.kernels.linear_cpu import has_int8_product, integer_sums
from qinfer.kernels.quantize_per_token import INT8_MAX, SMALLEST_SCALE

_INT8_MAX = torch.tensor([INT8_MAX], device="cpu")
_ROUND = torch.tensor([1.5 * 2**23], device="cpu")


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> x / scale [T, K], whose integers are the codes of `int8_per_token`, and scale [T, 1]."""
    x = x.float()
    scale = x.abs().amax(-1, True).div_(_INT8_MAX).clamp_min_(SMALLEST_SCALE)
    return x.div(scale), scale


def w8a8_int8_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale [N] -> [T, N] in x's dtype."""
    codes, scale = scaled(x)
    # of one column torch 2.13 takes [N, 1] transposed for [1, N] and reads beyond it
    if x.shape[1] == 1 or not has_int8_product():
        sums = integer_sums(codes.round_().nan_to_num_(0.0), weight)  # a broken row's scale makes NaN of it
    else:
        sums = torch._int_mm(codes.add_(_ROUND).view(torch.int32).char(), weight.t()).float()
    return sums.mul_(weight_scale.float()).mul_(scale).type_as(x)
