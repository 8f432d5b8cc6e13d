# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RMS norm on a GPU, with all that may be done to a row on the way: one pass over memory.

    partial sums of x -> + residual -> norm -> codes and scale

`run` launches it; the ops here and in `fused_norm_triton` choose what is done. A program holds whole rows in
registers, in float32. The sum with the residual is rounded to the dtype of the residual stream before it is
normed, as it will be read by the next block; the normed row is rounded once, to what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.offline import Variant
from qinfer.kernels.rows_triton import (
    CODES,
    MEASURED,
    as_parts,
    load_sum,
    offline_row,
    part_stride,
    row_formula,
    row_tile,
    store_rows,
    table_of,
)


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
    entry = row_tile(_op(parts), table_of(x.device), num_rows, length, row_formula)
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
    """The longest rows that a number of warps meets, to codes and with partial sums."""
    signature = {
        "x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*i8", "scales": "*fp32",
        "total": "*bf16", "num_rows": "i32", "x_stride": "i32", "residual_stride": "i32",
        "part_stride": "i32", "eps": "fp32", "offset": "fp32", "multiplier": "fp32",
    }  # fmt: skip
    aligned = ("x_stride", "residual_stride", "part_stride")
    for length in (576, 4096, 5120, 8192, 16384):
        for num_rows in (1, 4096):
            entry = row_tile(_op(1), MEASURED, num_rows, length, row_formula)
            constants = {"PARTS": 1, "LENGTH": length, "CODED": True, "ADD": True}
            yield offline_row(f"rms_norm {length}", _kernel, signature, constants, entry, aligned)
    parts = {**signature, "x": "*fp32"}
    constants = {"PARTS": 8, "LENGTH": 8192, "CODED": True, "ADD": True}
    entry = row_tile(_op(8), MEASURED, 1, 8192, row_formula)
    yield offline_row("rms_norm parts", _kernel, parts, constants, entry, aligned)


def _op(parts: int) -> str:
    return "rms_norm" if parts == 1 else "rms_norm_parts"


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
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = (row < num_rows)[:, None] & (lane < LENGTH)[None, :]
    factor = tl.load(weight + lane[None, :], mask=(lane < LENGTH)[None, :], other=0.0).to(tl.float32) + offset
    if EARLY:  # the weight is nobody's result, the rest is
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    values = load_sum(x + row[:, None] * x_stride + lane[None, :], mask, part_stride, PARTS)
    at = row[:, None] * LENGTH + lane[None, :]
    if ADD:
        before = tl.load(residual + row[:, None] * residual_stride + lane[None, :], mask=mask, other=0.0)
        new = (before.to(tl.float32) + multiplier * values).to(total.dtype.element_ty)
        tl.store(total + at, new, mask=mask)
        values = new.to(tl.float32)
    root = tl.rsqrt(tl.sum(values * values, 1) / LENGTH + eps)
    values = values * root[:, None] * factor
    store_rows(values, out + at, scales, row, num_rows, mask, out.dtype.element_ty, CODED)
