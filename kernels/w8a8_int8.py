"""Integer product of int8 weights per channel and int8 activations per token: the meaning.

    y[t, n] = sx[t] * sw[n] * sum_k qx[t, k] * qw[n, k] + bias[n]

The sum is exact (float64 holds it for any K below 2^38), so every faster path must give the same integers.
"""

import torch
from torch import Tensor

from qinfer.kernels.panels import rows_of
from qinfer.kernels.quantize_per_token import int8_per_token
from qinfer.kernels.sums import rounded


def w8a8_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight int8 [N, K] (or its panels), weight_scale float32 [N] -> [T, N] in x's dtype."""
    codes, scale = int8_per_token(x)
    return w8a8_int8_codes(codes, scale, weight, weight_scale, x.dtype, bias)


def w8a8_int8_codes(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of activations that are quantized already: codes int8 [T, K], scale [T, 1] -> `dtype`."""
    integers = codes.to(torch.float64) @ rows_of(weight, codes.shape[1]).to(torch.float64).T
    y = integers.float() * weight_scale * scale
    return rounded(y, bias, dtype)


def w8a8_int8_parts(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`w8a8_int8_codes` for an op that adds up partial sums; there is one here, and a twin may leave more."""
    return w8a8_int8_codes(codes, scale, weight, weight_scale, dtype)
