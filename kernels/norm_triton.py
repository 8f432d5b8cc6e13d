# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RMS norm on a GPU, with all that may be done to a row on the way: one pass over memory.

    partial sums of x -> + residual -> norm -> codes and scale

`run` launches it; the ops here and in `fused_norm_triton` choose what is done. A program holds whole rows in
registers, in float32. The sum with the residual is rounded to the dtype of the residual stream before it is
normed, as it will be read by the next block; the normed row is rounded once, to what is stored.

Registers hold a power of two of numbers. Short rows that are little longer than one, such as 576 numbers, are
held in two blocks where there are many of them, or every other thread would have nothing to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.offline import Variant
from qinfer.kernels.rows_triton import (
    CODES,
    MEASURED,
    as_parts,
    codes,
    each_row_tile,
    largest_of,
    load_sum,
    offline_row,
    part_stride,
    row_formula,
    row_tile,
    scale_of,
    table_of,
    take_turn,
)
from qinfer.kernels.tiles import Tile

FEW_ROWS = 512  # which do not fill a GPU, however they are held
# Longer rows keep it busy in one block: 20.9 us against 22.7 for 4096 of 2304, but of 1152 12.1 against 11.5,
# and of 576 7.7 against 6.7 (H200, to int8).
MOST_LANES = 2048


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), weight [H]."""

    weight: Tensor
    eps: float
    offset: float


class Rows(NamedTuple):
    """Results: stored [T, H], their scales [T, 1] if 8-bit, the new residual [T, H] if there was one."""

    stored: Tensor
    scale: Tensor | None
    total: Tensor | None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """As its meaning, x [..., H]; declines rows longer than 32768."""
    return run(x.reshape(-1, x.shape[-1]), Norm(weight, eps, offset), x.dtype).stored.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As its meaning, x and residual [..., H]; declines rows longer than 32768."""
    rows, residual = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
    out = run(rows, Norm(weight, eps, offset), x.dtype, residual, multiplier)
    assert out.total is not None
    return out.stored.view(x.shape), out.total.view(x.shape)


def run(
    x: Tensor, norm: Norm, dtype: torch.dtype, residual: Tensor | None = None, multiplier: float = 1.0
) -> Rows:
    """Norms x [T, H] or partial sums [S, T, H] (plus the residual [T, H]) to `dtype`, which may be 8-bit."""
    x, parts = as_parts(x)
    num_rows, length = x.shape[-2:]
    entry = _entry(table_of(x.device), num_rows, length, parts)
    out = torch.empty(num_rows, length, dtype=dtype, device=x.device)
    scale = torch.empty(num_rows, 1, device=x.device) if dtype in CODES else None
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    total = None if residual is None else torch.empty(num_rows, length, dtype=residual.dtype, device=x.device)
    _kernel[(triton.cdiv(num_rows, entry["ROWS"]),)](
        x,
        residual,
        norm.weight,
        out,
        scale,
        total,
        num_rows,
        x.stride(-2),
        0 if residual is None else residual.stride(0),
        part_stride(x),
        norm.eps,
        norm.offset,
        multiplier,
        PARTS=parts,
        LENGTH=length,
        CODED=dtype in CODES,
        ADD=residual is not None,
        **entry,
    )
    return Rows(out, scale, total)


def offline_variants() -> Iterator[Variant]:
    """Rows of published models' widths, to codes and with partial sums."""
    signature = {
        "x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*i8", "scales": "*fp32",
        "total": "*bf16", "num_rows": "i32", "x_stride": "i32", "residual_stride": "i32",
        "part_stride": "i32", "eps": "fp32", "offset": "fp32", "multiplier": "fp32",
    }  # fmt: skip
    aligned = ("x_stride", "residual_stride", "part_stride")
    for length in (576, 1152, 4096, 5120, 8192, 16384):
        for num_rows in sorted({*each_row_tile("rms_norm", length), 4096}):
            entry = _entry(MEASURED, num_rows, length, 1)
            constants = {"PARTS": 1, "LENGTH": length, "CODED": True, "ADD": True}
            name = f"rms_norm {length} x {num_rows}"
            yield offline_row(name, _kernel, signature, constants, entry, aligned)
    for length in (576, 1152, 4096, 8192):
        for num_rows in each_row_tile("rms_norm_parts", length):
            entry = _entry(MEASURED, num_rows, length, 8)
            constants = {"PARTS": 8, "LENGTH": length, "CODED": True, "ADD": True}
            name = f"rms_norm {length} x {num_rows}, 8 parts"
            yield offline_row(name, _kernel, {**signature, "x": "*fp32"}, constants, entry, aligned)


def _entry(gpu: str, num_rows: int, length: int, parts: int) -> dict[str, Any]:
    """What a table or a formula says, and REST, the length of a second block."""
    lanes = triton.next_power_of_2(length)
    rest = triton.next_power_of_2(length - lanes // 2) if length > 1 else lanes
    if parts > 1 or num_rows <= FEW_ROWS or rest * 4 > lanes or lanes > MOST_LANES:
        op = "rms_norm" if parts == 1 else "rms_norm_parts"
        return {**row_tile(op, gpu, num_rows, length, row_formula), "REST": 0}
    entry = row_tile("rms_norm_blocks", gpu, num_rows, length, block_formula)
    return {**entry, "LANES": lanes // 2, "REST": rest}


def block_formula(num_rows: int, lanes: int) -> Tile:
    """Rows in two blocks, of lanes / 2 numbers and less."""
    return {"ROWS": max(1, MOST_LANES // lanes), "num_warps": 2, "EARLY": 2}


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x,
    residual,
    weight,
    out,
    scales,
    total,
    num_rows,
    x_stride,
    residual_stride,
    part_stride,
    eps,
    offset,
    multiplier,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    CODED: tl.constexpr,
    ADD: tl.constexpr,
    LANES: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """LANES numbers of each row and, if it is longer, REST more, in a block of their own."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = (row < num_rows)[:, None] & (lane < LENGTH)[None, :]
    factor = tl.load(weight + lane[None, :], mask=(lane < LENGTH)[None, :], other=0.0).to(tl.float32) + offset
    if REST > 0:
        lane2 = LANES + tl.arange(0, REST)
        mask2 = (row < num_rows)[:, None] & (lane2 < LENGTH)[None, :]
        factor2 = tl.load(weight + lane2[None, :], mask=(lane2 < LENGTH)[None, :], other=0.0)
        factor2 = factor2.to(tl.float32) + offset
    take_turn(EARLY)  # the weight is nobody's result, the rest is
    values = load_sum(x + row[:, None] * x_stride + lane[None, :], mask, part_stride, PARTS)
    if REST > 0:
        values2 = load_sum(x + row[:, None] * x_stride + lane2[None, :], mask2, part_stride, PARTS)
    at = row[:, None] * LENGTH + lane[None, :]
    if ADD:
        residual += row[:, None] * residual_stride
        before = tl.load(residual + lane[None, :], mask=mask, other=0.0)
        if REST > 0:
            before2 = tl.load(residual + lane2[None, :], mask=mask2, other=0.0)
        values = _added(values, before, multiplier, total + at, mask)
    squares = tl.sum(values * values, 1)
    if REST > 0:
        at2 = row[:, None] * LENGTH + lane2[None, :]
        if ADD:
            values2 = _added(values2, before2, multiplier, total + at2, mask2)
        squares += tl.sum(values2 * values2, 1)
    root = tl.rsqrt(squares / LENGTH + eps)[:, None]
    values = values * root * factor
    if REST > 0:
        values2 = values2 * root * factor2
    if CODED:
        bits = largest_of(values)
        if REST > 0:
            bits = tl.maximum(bits, largest_of(values2))
        scale = scale_of(bits, out.dtype.element_ty)
        tl.store(scales + row, scale, mask=row < num_rows)
        values = codes(values, scale, out.dtype.element_ty)
        if REST > 0:
            values2 = codes(values2, scale, out.dtype.element_ty)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        tl.store(out + at2, values2.to(out.dtype.element_ty), mask=mask2)


@triton.jit
def _added(values, before, multiplier, at, mask):
    """before + multiplier * values, rounded to the dtype of `at`, where it is stored, in float32."""
    new = (before.to(tl.float32) + multiplier * values).to(at.dtype.element_ty)
    tl.store(at, new, mask=mask)
    return new.to(tl.float32)
