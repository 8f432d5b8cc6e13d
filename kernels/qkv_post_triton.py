# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Bias, head norms, rotation and the writing of K and V in one pass on a GPU: the twin of `qkv_post`.

A program takes some heads of one kind (queries, keys or values) of some tokens: rows of D numbers. A row lies
in registers in three pieces, the two halves that turn together and what does not turn, so that rotating needs
no exchange between threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.kv_store_triton import int8_step, stored
from qinfer.kernels.kv_unpack_triton import INT8
from qinfer.kernels.offline import Variant
from qinfer.kernels.paged_shapes_triton import machine_of
from qinfer.kernels.qkv_post import HeadNorms
from qinfer.kernels.rows_triton import MEASURED, launch, take_turn
from qinfer.kernels.tiles import Declined, each_row, tile
from qinfer.kernels.write_kv_triton import kind_of, slot_rows

MAX_PARTS = 16  # partial sums that a program loads at once


MAX_HEADS = 8  # of a program


def formula(num_tokens: int, _: int, __: int) -> Mapping[str, int]:
    """Rows per program, few while the tokens hardly fill the GPU."""
    few = num_tokens <= 256
    return {"ROWS": 4 if few else 16, "num_warps": 1 if few else 4, "EARLY": 2}


def qkv_post(
    qkv: Tensor,
    pages: KVPages,
    slots: Tensor,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    norms: HeadNorms | None = None,
    bias: Tensor | None = None,
    q_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As its meaning; declines more than 16 partial sums."""
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    if parts > MAX_PARTS:
        raise Declined(f"{parts} partial sums; the kernel adds up to {MAX_PARTS}")
    num_kv_heads, page_size, dim = pages.k.shape[1:]
    num_tokens, width = qkv.shape[-2:]
    num_heads = width // dim
    num_q_heads = num_heads - 2 * num_kv_heads
    q = torch.empty(num_tokens, num_q_heads, dim, dtype=dtype or qkv.dtype, device=qkv.device)
    half = (dim if rotation is None else rotation[0].shape[-1]) // 2
    rest = dim - 2 * half
    entry = launch(tile("qkv_post", machine_of(qkv.device).key, formula, num_tokens))
    num_rows = entry.pop("ROWS")
    heads = min(num_rows, gcd(num_q_heads, num_kv_heads, MAX_HEADS))
    _kernel[(num_heads // heads, triton.cdiv(num_tokens, num_rows // heads))](
        qkv,
        bias,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        None if rotation is None else rotation[0],
        None if rotation is None else rotation[1],
        slots,
        q,
        pages.k,
        pages.v,
        pages.k_scales,
        pages.v_scales,
        num_tokens,
        num_q_heads,
        num_kv_heads,
        qkv.stride(0) if qkv.dim() == 3 else 0,
        qkv.stride(-2),
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.offset,
        q_scale,
        pages.k_scale,
        pages.v_scale,
        PARTS=parts,
        DIM=dim,
        HALF=half,
        HALF_LANES=triton.next_power_of_2(half),
        REST=rest,
        REST_LANES=triton.next_power_of_2(max(1, rest)),
        PAGE=page_size,
        KIND=kind_of(pages.k.dtype),
        BIAS=bias is not None,
        NORM=norms is not None,
        ROPE=rotation is not None,
        HEADS=heads,
        ROWS=num_rows,
        **entry,
    )
    return q


def offline_variants() -> Iterator[Variant]:
    """Every kind of page, with and without head norms and bias."""
    for kind, element in enumerate(("*bf16", "*i8", "*fp8e4nv")):
        for full, num_tokens in product((False, True), each_row("qkv_post", MEASURED)):
            signature = {
                **dict.fromkeys(("qkv", "q", "cos", "sin"), "*bf16"),
                **dict.fromkeys(("k", "v"), element),
                **dict.fromkeys(("num_tokens", "num_q_heads", "num_kv_heads"), "i32"),
                **dict.fromkeys(("part_stride", "token_stride"), "i32"),
                **dict.fromkeys(("eps", "offset", "q_scale", "k_scale", "v_scale"), "fp32"),
                "slots": "*i64",
            }
            constants = {"PARTS": 1, "DIM": 128, "HALF": 64, "HALF_LANES": 64, "REST": 0, "REST_LANES": 1}
            constants |= {"PAGE": 64, "KIND": kind, "BIAS": full, "NORM": full, "ROPE": True, "HEADS": 8}
            optional = dict.fromkeys(("bias", "q_weight", "k_weight"), "*bf16" if full else None)
            optional |= dict.fromkeys(("k_scales", "v_scales"), "*fp32" if kind == INT8.value else None)
            signature |= {name: of for name, of in optional.items() if of is not None}
            absent = {name: None for name, of in optional.items() if of is None}
            options = launch(tile("qkv_post", MEASURED, formula, num_tokens))
            fixed = {**constants, **absent, **{name: options.pop(name) for name in ("ROWS", "EARLY")}}
            name = f"qkv_post {element} {full} x {num_tokens}"
            yield Variant(name, _kernel, signature, fixed, options, ("token_stride",))


@triton.jit
def _piece(qkv, bias, row_at, head, mask, part_stride, first, LANES: tl.constexpr, DIM: tl.constexpr,
           PARTS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Dimensions from `first` of the rows' heads, partial sums and bias added up: [ROWS, LANES] float32."""
    lane = first + tl.arange(0, LANES)
    at = qkv + row_at[:, None] + lane[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + (head * DIM)[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _weights(q_weight, k_weight, is_q, first, offset, LENGTH: tl.constexpr, LANES: tl.constexpr):
    """What normed dimensions from `first` are multiplied by: [1, LANES]."""
    lane = tl.arange(0, LANES)
    if is_q:
        weight = tl.load(q_weight + first + lane, mask=lane < LENGTH, other=0.0).to(tl.float32)
    else:
        weight = tl.load(k_weight + first + lane, mask=lane < LENGTH, other=0.0).to(tl.float32)
    return (weight + offset)[None, :]


@triton.jit(do_not_specialize=["num_tokens", "num_q_heads", "num_kv_heads"])
def _kernel(
    qkv,
    bias,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    q,
    k,
    v,
    k_scales,
    v_scales,
    num_tokens,
    num_q_heads,
    num_kv_heads,
    part_stride,
    token_stride,
    eps,
    offset,
    q_scale,
    k_scale,
    v_scale,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST: tl.constexpr,
    REST_LANES: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, and of one kind
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    first_head = tl.program_id(0) * HEADS
    head = first_head + row % HEADS
    token = (tl.program_id(1) * (ROWS // HEADS) + row // HEADS).to(tl.int64)
    is_q = first_head < num_q_heads
    real = token < num_tokens
    lane = tl.arange(0, HALF_LANES)
    mask = real[:, None] & (lane < HALF)[None, :]
    rest_lane = tl.arange(0, REST_LANES)
    rest_mask = real[:, None] & (rest_lane < REST)[None, :]
    take_turn(EARLY)

    row_at = token * token_stride + head * DIM
    left = _piece(qkv, bias, row_at, head, mask, part_stride, 0, HALF_LANES, DIM, PARTS, BIAS)
    right = _piece(qkv, bias, row_at, head, mask, part_stride, HALF, HALF_LANES, DIM, PARTS, BIAS)
    rest = tl.zeros((ROWS, REST_LANES), tl.float32)
    if REST > 0:
        rest = _piece(qkv, bias, row_at, head, rest_mask, part_stride, 2 * HALF, REST_LANES, DIM, PARTS, BIAS)
    if (NORM or ROPE) and first_head < num_q_heads + num_kv_heads:
        if NORM:
            squares = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(rest * rest, 1)
            root = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
            left *= root * _weights(q_weight, k_weight, is_q, 0, offset, HALF, HALF_LANES)
            right *= root * _weights(q_weight, k_weight, is_q, HALF, offset, HALF, HALF_LANES)
            if REST > 0:
                rest *= root * _weights(q_weight, k_weight, is_q, 2 * HALF, offset, REST, REST_LANES)
        if ROPE:
            angle = token[:, None] * (2 * HALF) + lane[None, :]
            cos_left = tl.load(cos + angle, mask=mask, other=1.0).to(tl.float32)
            cos_right = tl.load(cos + angle + HALF, mask=mask, other=1.0).to(tl.float32)
            sin_left = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
            sin_right = tl.load(sin + angle + HALF, mask=mask, other=0.0).to(tl.float32)
            turned = left * cos_left + right * sin_left
            right = right * cos_right + left * sin_right
            left = turned

    if is_q:
        q_at = ((token * num_q_heads + head) * DIM)[:, None]
        element = q.dtype.element_ty
        tl.store(q + q_at + lane[None, :], (left * q_scale).to(element), mask=mask)
        tl.store(q + q_at + HALF + lane[None, :], (right * q_scale).to(element), mask=mask)
        if REST > 0:
            tl.store(q + q_at + 2 * HALF + rest_lane[None, :], (rest * q_scale).to(element), mask=rest_mask)
    elif first_head < num_q_heads + num_kv_heads:
        at = slot_rows(slots, token, head - num_q_heads, real, num_kv_heads, PAGE)
        _put(left, right, rest, k, k_scales, at, real, k_scale, DIM, HALF, HALF_LANES, REST, REST_LANES, KIND)
    else:
        at = slot_rows(slots, token, head - num_q_heads - num_kv_heads, real, num_kv_heads, PAGE)
        _put(left, right, rest, v, v_scales, at, real, v_scale, DIM, HALF, HALF_LANES, REST, REST_LANES, KIND)


@triton.jit
def _put(left, right, rest, pages, scales, at, real, scale, DIM: tl.constexpr, HALF: tl.constexpr,
         HALF_LANES: tl.constexpr, REST: tl.constexpr, REST_LANES: tl.constexpr,
         KIND: tl.constexpr):  # fmt: skip
    """Rows of K or V to rows `at` of their pages."""
    lane = tl.arange(0, HALF_LANES)
    mask = real[:, None] & (lane < HALF)[None, :]
    element = pages.dtype.element_ty
    inverse = 1.0 / scale
    if KIND == INT8:
        amax = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        step = int8_step(tl.maximum(amax, tl.max(tl.abs(rest), 1)))
        tl.store(scales + at, step, mask=real)
        inverse = (1.0 / step)[:, None]
    where = at[:, None] * DIM + lane[None, :]
    tl.store(pages + where, stored(left, inverse, KIND, element), mask=mask)
    tl.store(pages + where + HALF, stored(right, inverse, KIND, element), mask=mask)
    if REST > 0:
        rest_lane = tl.arange(0, REST_LANES)
        rest_mask = real[:, None] & (rest_lane < REST)[None, :]
        where = at[:, None] * DIM + 2 * HALF + rest_lane[None, :]
        tl.store(pages + where, stored(rest, inverse, KIND, element), mask=rest_mask)
