# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Float8 products on a GPU: the twin of w8a8_fp8.py; the kernels are in w8a8_triton.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.quantize_per_token_triton import fp8_per_token
from qinfer.kernels.w8a8_triton import multiply


def w8a8_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    return multiply("w8a8_fp8", *fp8_per_token(x), weight, weight_scale, x.dtype, bias)


def w8a8_fp8_static(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    return multiply("w8a8_fp8", fp8_static(x, input_scale), input_scale, weight, weight_scale, x.dtype, bias)


def w8a8_fp8_codes(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    return multiply("w8a8_fp8", codes, scale, weight, weight_scale, dtype, bias)


def w8a8_fp8_parts(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """float32 [S, T, N], for the next kernel to add up over S; where S would be 1, [T, N] in `dtype`."""
    return multiply("w8a8_fp8", codes, scale, weight, weight_scale, dtype, in_parts=True)


def fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """As its meaning."""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if x.numel():
        quantize_with[(triton.cdiv(x.numel(), 2048),)](x, codes, scale, x.numel(), BLOCK=2048, num_warps=4)
    return codes


@triton.jit
def quantize_with(x, out, scale, total, BLOCK: tl.constexpr):
    """BLOCK elements of x a program, divided by the one scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.div_rn(tl.load(x + at, mask=at < total, other=0.0).to(tl.float32), tl.load(scale))
    values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < total)
