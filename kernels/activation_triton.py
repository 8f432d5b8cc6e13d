# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gated activations on a GPU, plain or to 8-bit codes: one pass over memory.

Both activations are x * sigmoid(z): z = x for SiLU, and for GELU by its tanh formula z = 2 sqrt(2 / pi) *
(x + 0.044715 x^3), since (1 + tanh(y)) / 2 = sigmoid(2 y). So one exponential and one quotient do.

Without codes nothing connects the numbers of a row, and programs cut it into pieces. With codes a program
holds the whole row in registers: its scale needs the largest of all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.offline import Variant
from qinfer.kernels.rows_triton import (
    CODES,
    INTERPRETED,
    MEASURED,
    as_parts,
    launch,
    load_sum,
    offline_row,
    part_stride,
    row_tile,
    store_rows,
    table_of,
)
from qinfer.kernels.tiles import Tile, tile

ASM = tl.constexpr(not INTERPRETED)  # the interpreter knows no assembly
LOG2E = tl.constexpr(1.4426950408889634)
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


def piece_formula(num_rows: int, _: int, __: int) -> Tile:
    """Pieces of a row without codes."""
    return {"ROWS": 1, "LANES": 1024, "num_warps": 4, "EARLY": 1}


def code_formula(num_rows: int, lanes: int) -> Tile:
    """Whole rows with codes."""
    warps = max(4, min(32, lanes // 512)) if lanes <= 16384 else 16
    return {"ROWS": 1, "num_warps": warps, "EARLY": int(num_rows <= 512 or lanes <= 16384)}


def silu_mul(gate_up: Tensor) -> Tensor:
    """As its meaning."""
    return run(gate_up, gate_up.dtype, gelu=False)[0]


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As its meaning."""
    return run(gate_up, gate_up.dtype, gelu=True)[0]


def run(gate_up: Tensor, dtype: torch.dtype, *, gelu: bool) -> tuple[Tensor, Tensor | None]:
    """act(gate) * up of [T, 2 I] or partial sums [S, T, 2 I] in `dtype`; of 8-bit ones the scales too."""
    gate_up, parts = as_parts(gate_up)
    num_rows, length = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = torch.empty(num_rows, length, dtype=dtype, device=gate_up.device)
    scale = torch.empty(num_rows, 1, device=gate_up.device) if dtype in CODES else None
    if scale is None:
        entry = launch(tile("gated", table_of(gate_up.device), piece_formula, num_rows))
    else:
        entry = row_tile("gated_codes", table_of(gate_up.device), num_rows, length, code_formula)
    _kernel[(triton.cdiv(num_rows, entry["ROWS"]), triton.cdiv(length, entry["LANES"]))](
        gate_up,
        out,
        scale,
        num_rows,
        gate_up.stride(-2),
        part_stride(gate_up),
        PARTS=parts,
        LENGTH=length,
        CODED=dtype in CODES,
        GELU=gelu,
        **entry,
    )
    return out, scale


def offline_variants() -> Iterator[Variant]:
    """Rows with codes, at the widths of published models, and pieces without."""
    signature = {
        "gate_up": "*bf16", "out": "*i8", "scales": "*fp32", "num_rows": "i32", "stride": "i32",
        "part_stride": "i32",
    }  # fmt: skip
    aligned = ("stride", "part_stride")
    for length in (1536, 4864, 14336, 28672):
        for num_rows in (1, 256, 4096):
            entry = row_tile("gated_codes", MEASURED, num_rows, length, code_formula)
            constants = {"PARTS": 1, "LENGTH": length, "CODED": True, "GELU": num_rows == 1}
            yield offline_row(f"gated_codes {length}", _kernel, signature, constants, entry, aligned)
    bare = {"PARTS": 1, "LENGTH": 14336, "CODED": False, "GELU": False, "scales": None}
    plain = {name: kind for name, kind in {**signature, "out": "*bf16"}.items() if name != "scales"}
    for num_rows in (1, 4096):
        entry = launch(tile("gated", MEASURED, piece_formula, num_rows))
        yield offline_row("gated", _kernel, plain, bare, entry, aligned)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)); two instructions of the special unit, without those that care for tiny numbers."""
    power = -LOG2E * x
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
            "=f,f",
            [power],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (1.0 + tl.exp2(power))


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    gate_up,
    out,
    scales,
    num_rows,
    stride,
    part_stride,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    CODED: tl.constexpr,
    GELU: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = (row < num_rows)[:, None] & (lane < LENGTH)[None, :]
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    at = gate_up + row[:, None] * stride + lane[None, :]
    gate = load_sum(at, mask, part_stride, PARTS)
    up = load_sum(at + LENGTH, mask, part_stride, PARTS)
    slope = gate * (1.0 + 0.044715 * gate * gate) * GELU_SLOPE if GELU else gate
    values = gate * _sigmoid(slope) * up
    at = out + row[:, None] * LENGTH + lane[None, :]
    store_rows(values, at, scales, row, num_rows, mask, out.dtype.element_ty, CODED)
