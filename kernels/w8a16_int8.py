"""Product with int8 weights per channel that are widened as they are read; activations stay as they are.

    y[t, n] = sw[n] * sum_k x[t, k] * qw[n, k] + bias[n]

An int8 code is exact in bfloat16 and in float32, so the scale is applied to the sum and rounds only once.
"""

import torch
from torch import Tensor

from qinfer.kernels.panels import from_fragments
from qinfer.kernels.sums import rounded


def w8a16_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight int8 [N, K] (or its fragments), weight_scale [N] -> [T, N] like x; float32 sum."""
    if weight.dtype is torch.int32:
        weight = from_fragments(weight, x.shape[1], torch.int8)
    y = x.float() @ weight.float().T * weight_scale.float()
    return rounded(y, bias, x.dtype)


def w8a16_int8_parts(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """`w8a16_int8` for an op that adds up partial sums; there is one here, and a twin may leave more."""
    return w8a16_int8(x, weight, weight_scale)
