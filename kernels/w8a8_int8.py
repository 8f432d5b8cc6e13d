"""Integer product of int8 weights per channel and int8 activations per token: the meaning.

    y[t, n] = sx[t] * sw[n] * sum_k qx[t, k] * qw[n, k]

The sum is exact (float64 holds it for any K below 2^38), so every faster path must give the same integers.
"""

import torch
from torch import Tensor

from qinfer.kernels.quantize_per_token import int8_per_token


def w8a8_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale float32 [N] -> [T, N] in x's dtype."""
    codes, scale = int8_per_token(x)
    integers = codes.to(torch.float64) @ weight.to(torch.float64).T
    return (integers.float() * weight_scale * scale).to(x.dtype)
