"""Product of `w8a8_fp8_block` on the CPU: weights with their block scales applied once, at load.

There is no float8 arithmetic here, and a scale for every 128 columns cannot be applied to the whole sum. So
both sides are widened to the numbers that they mean, in bfloat16 where activations are bfloat16 (each number
is then rounded by at most 2^-9, a thirty-second of float8's own step), else in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from qinfer.kernels.linear_cpu import linear
from qinfer.kernels.w8a8_fp8_block import GROUP
from qinfer.kernels.w8a8_fp8_cpu import float8_values, wide_dtype


def scale_and_widen(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes float8_e4m3fn [N, K] with scale [N, ceil(K/128)] -> the weight that they mean [N, K]."""
    scale = weight_scale.float().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return (weight.float() * scale).to(wide_dtype(dtype))


def w8a8_fp8_block_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight from `scale_and_widen` -> [T, N] in x's dtype."""
    tokens, columns = x.shape
    groups = -(-columns // GROUP)
    padded = functional.pad(x, (0, groups * GROUP - columns))
    codes, scale = float8_values(padded.view(tokens, groups, GROUP))
    values = codes.mul_(scale).view(tokens, groups * GROUP)[:, :columns]
    return linear(values.type_as(weight), weight).type_as(x)
