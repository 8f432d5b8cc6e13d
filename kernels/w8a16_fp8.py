"""Product with float8 e4m3fn weights per channel that are widened as they are read: the meaning.

    y[t, n] = sw[n] * sum_k x[t, k] * qw[n, k] + bias[n]

A float8 code is exact in bfloat16, float16 and float32; the scale is applied to the sum, which rounds once.
"""

import torch
from torch import Tensor

from qinfer.kernels.panels import from_fragments
from qinfer.kernels.sums import rounded


def w8a16_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight float8 [N, K] (or its fragments), weight_scale [N] -> [T, N] like x; float32 sum."""
    if weight.dtype is torch.int32:
        weight = from_fragments(weight, x.shape[1], torch.float8_e4m3fn)
    y = x.float() @ weight.float().T * weight_scale.float()
    return rounded(y, bias, x.dtype)
