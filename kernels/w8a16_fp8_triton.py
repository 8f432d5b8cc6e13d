"""Product with float8 weights on a GPU: the twin of w8a16_fp8.py; the kernels are in w8a16_triton.py."""

from __future__ import annotations

from torch import Tensor

from qinfer.kernels.w8a16_triton import multiply


def w8a16_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As its meaning; declines a weight that does not lie in fragments, and float32 activations."""
    return multiply("w8a16_fp8", x, weight, weight_scale, bias, fp8=True)


def w8a16_fp8_parts(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """float32 [S, T, N], for the next kernel to add up over S; where S would be 1, [T, N] in x's dtype."""
    return multiply("w8a16_fp8", x, weight, weight_scale, None, fp8=True, in_parts=True)
