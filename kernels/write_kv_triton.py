# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Writes K and V into their pages on a GPU: the twin of `write_kv`, one launch for both.

A program takes some consecutive rows (token, head) of K or of V. `qkv_post_triton` does this and all that
comes before it in one pass; this is for callers that have K and V already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.kv_format import FP8 as FP8_DTYPE
from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.kv_store_triton import int8_step, stored
from qinfer.kernels.kv_unpack_triton import FP8, INT8, PLAIN

ROWS = 16  # (token, head) rows per program


def write_kv(k: Tensor, v: Tensor, pages: KVPages, slots: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `slots` [T] int64 of the layer's pages, in place; negative: page 0."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    num_rows = k.shape[0] * k.shape[1]
    _write[(triton.cdiv(num_rows, ROWS), 2)](
        k,
        v,
        pages.k,
        pages.v,
        pages.k_scales,
        pages.v_scales,
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        num_rows,
        k.shape[1],
        pages.k_scale,
        pages.v_scale,
        DIM=k.shape[2],
        LANES=triton.next_power_of_2(k.shape[2]),
        PAGE=pages.k.shape[2],
        KIND=kind_of(pages.k.dtype),
        ROWS=ROWS,
    )


def kind_of(dtype: torch.dtype) -> int:
    """How numbers of a page's dtype are read and written."""
    if dtype == torch.int8:
        return int(INT8.value)
    return int(FP8.value if dtype == FP8_DTYPE else PLAIN.value)


@triton.jit
def slot_rows(slots, token, head, mask, num_kv_heads, PAGE: tl.constexpr):
    """Where rows (token, head) lie in [num_pages * Hkv * PAGE], int64."""
    slot = tl.maximum(tl.load(slots + token, mask=mask, other=0), 0)
    return ((slot // PAGE) * num_kv_heads + head) * PAGE + slot % PAGE


@triton.jit(do_not_specialize=["num_rows", "num_kv_heads"])
def _write(
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    slots,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_rows,
    num_kv_heads,
    k_scale,
    v_scale,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    token = (row // num_kv_heads).to(tl.int64)
    head = row % num_kv_heads
    at = slot_rows(slots, token, head, real, num_kv_heads, PAGE)
    if tl.program_id(1) == 0:
        source = k + token * k_token_stride + head * k_head_stride
        _copy(source, k_pages, k_scales, at, real, k_scale, DIM, LANES, KIND)
    else:
        source = v + token * v_token_stride + head * v_head_stride
        _copy(source, v_pages, v_scales, at, real, v_scale, DIM, LANES, KIND)


@triton.jit
def _copy(source, pages, scales, at, real, scale, DIM: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr):
    """Rows beginning at `source` to rows `at` of the pages."""
    lane = tl.arange(0, LANES)
    mask = real[:, None] & (lane < DIM)[None, :]
    x = tl.load(source[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    if KIND == INT8:
        step = int8_step(tl.max(tl.abs(x), 1))
        tl.store(scales + at, step, mask=real)
        numbers = stored(x, (1.0 / step)[:, None], KIND, pages.dtype.element_ty)
    else:
        numbers = stored(x, 1.0 / scale, KIND, pages.dtype.element_ty)
    tl.store(pages + at[:, None] * DIM + lane[None, :], numbers, mask=mask)
