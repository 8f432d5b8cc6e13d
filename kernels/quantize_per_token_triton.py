# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Dynamic quantization of activations on a GPU: a row is read once, its codes and scale are written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.offline import Variant
from qinfer.kernels.rows_triton import (
    MEASURED,
    codes,
    each_row_tile,
    offline_row,
    row_formula,
    row_scale,
    row_tile,
    table_of,
    take_turn,
)


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning, x [T, K]; declines rows longer than 32768."""
    return _run(x, torch.int8)


def fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning, x [T, K]; declines rows longer than 32768."""
    return _run(x, torch.float8_e4m3fn)


def _run(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_rows, length = x.shape
    entry = row_tile("codes", table_of(x.device), num_rows, length, row_formula)
    codes = torch.empty(num_rows, length, dtype=dtype, device=x.device)
    scale = torch.empty(num_rows, 1, device=x.device)
    grid = (triton.cdiv(num_rows, entry["ROWS"]),)
    _kernel[grid](x, codes, scale, num_rows, x.stride(0), LENGTH=length, **entry)
    return codes, scale


def offline_variants() -> Iterator[Variant]:
    """Rows of a published model's hidden and intermediate widths."""
    signature = {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32", "num_rows": "i32", "stride": "i32"}
    for length in (4096, 14336, 28672):
        for num_rows in sorted({*each_row_tile("codes", length), 4096}):
            entry = row_tile("codes", MEASURED, num_rows, length, row_formula)
            name = f"codes {length} x {num_rows}"
            yield offline_row(name, _kernel, signature, {"LENGTH": length}, entry, ("stride",))


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x,
    out,
    scales,
    num_rows,
    stride,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = (row < num_rows)[:, None] & (lane < LENGTH)[None, :]
    take_turn(EARLY)
    values = tl.load(x + row[:, None] * stride + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(values, out.dtype.element_ty)
    at = out + row[:, None] * LENGTH + lane[None, :]
    tl.store(at, codes(values, scale, out.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < num_rows)
