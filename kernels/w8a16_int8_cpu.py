"""Product of `w8a16_int8` on the CPU: torch's int8 weight op for few rows, widened weights for more.

Measured on one core of a Xeon with AMX, us at 1 / 4 / 8 / 16 / 64 rows, bfloat16, weight 1536 x 576:
    torch._weight_int8pack_mm          86 / 130 / 261 / 680 / 2109
    weight to bfloat16, then linear   385 / 372 / 391 / 409 /  543
With float32 activations the op takes milliseconds where widening takes a quarter of one: never used.
"""

import torch
from torch import Tensor

from qinfer.kernels.linear_cpu import linear

MAX_ROWS_OF_INT8_OP = 8


def w8a16_int8_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale [N] in x's dtype -> [T, N] in x's dtype."""
    # of columns that 8 does not divide torch 2.13 reads beyond the end, without AVX-512 at least
    if x.dtype is torch.bfloat16 and x.shape[0] <= MAX_ROWS_OF_INT8_OP and x.shape[1] % 8 == 0:
        return torch._weight_int8pack_mm(x, weight, weight_scale)
    # Codes are exact in every float dtype that a model has (float16 holds integers up to 2048).
    return linear(x, weight.to(x.dtype)) * weight_scale
