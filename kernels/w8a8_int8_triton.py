"""Integer product on a GPU: the twin of w8a8_int8.py; the kernels are in w8a8_triton.py."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels.quantize_per_token_triton import int8_per_token
from qinfer.kernels.w8a8_triton import multiply


def w8a8_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    return multiply("w8a8_int8", *int8_per_token(x), weight, weight_scale, x.dtype, bias)


def w8a8_int8_codes(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    return multiply("w8a8_int8", codes, scale, weight, weight_scale, dtype, bias)


def w8a8_int8_parts(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """float32 [S, T, N], for the next kernel to add up over S; where S would be 1, [T, N] in `dtype`."""
    return multiply("w8a8_int8", codes, scale, weight, weight_scale, dtype, in_parts=True)
