# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gated activations on a GPU, plain or to 8-bit codes: one pass over memory.

Both activations are x * sigmoid(z): z = x for SiLU, and for GELU by its tanh formula z = 2 sqrt(2 / pi) *
(x + 0.044715 x^3), since (1 + tanh(y)) / 2 = sigmoid(2 y). So one exponential and one quotient do.

Without codes nothing connects the numbers of a row, and programs cut it into pieces. With codes a program
holds the whole row in registers: its scale needs the largest of all. Few long rows would leave most of a GPU
idle for microseconds, so there a table may cut them as well (PIECES); the programs of a row then meet.

Partial sums of long rows fill the registers: a thread's numbers of gate and of up, while more of either come.
There a program goes along its row by LANES numbers, and keeps only their products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.offline import Variant
from qinfer.kernels.rows_triton import (
    ASM,
    CODES,
    MAX_PROGRAMS,
    MEASURED,
    agreed_scale,
    as_parts,
    codes,
    each_row_tile,
    largest_of,
    launch,
    load_sum,
    meeting_of,
    meeting_words,
    offline_row,
    part_stride,
    row_tile,
    table_of,
    take_turn,
)
from qinfer.kernels.tiles import Tile, each_row, tile

LOG2E = tl.constexpr(1.4426950408889634)
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
# 1 / (1 + 2^x); two instructions of the special unit, without those that care for tiny numbers
LOGISTIC = tl.constexpr("""{ .reg .f32 t;
    ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""")


def piece_formula(num_rows: int, _: int, __: int) -> Tile:
    """Pieces of a row without codes."""
    return {"ROWS": 1, "LANES": 1024, "num_warps": 4, "EARLY": 2}


def code_formula(num_rows: int, lanes: int) -> Tile:
    """Whole rows with codes."""
    warps = max(4, min(32, lanes // 512)) if lanes <= 16384 else 16
    return {"ROWS": 1, "num_warps": warps, "EARLY": 2 * int(num_rows <= 512 or lanes <= 16384)}


def part_formula(num_rows: int, lanes: int) -> Tile:
    """Whole rows with codes, of partial sums."""
    return {**code_formula(num_rows, lanes), "LANES": min(lanes, 4096)}


def silu_mul(gate_up: Tensor, turn: int | None = None) -> Tensor:
    """As its meaning."""
    return run(gate_up, gate_up.dtype, gelu=False, turn=turn)[0]


def gelu_mul(gate_up: Tensor, turn: int | None = None) -> Tensor:
    """As its meaning."""
    return run(gate_up, gate_up.dtype, gelu=True, turn=turn)[0]


def run(
    gate_up: Tensor, dtype: torch.dtype, *, gelu: bool, turn: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """act(gate) * up of [T, 2 I] or partial sums [S, T, 2 I] in `dtype`; of 8-bit ones the scales too."""
    gate_up, parts = as_parts(gate_up)
    num_rows, length = gate_up.shape[-2], gate_up.shape[-1] // 2
    out = torch.empty(num_rows, length, dtype=dtype, device=gate_up.device)
    coded = dtype in CODES
    scale = torch.empty(num_rows, 1, device=gate_up.device) if coded else None
    entry = _entry(table_of(gate_up.device), num_rows, length, parts, coded)
    pieces = entry["PIECES"]
    _kernel[(triton.cdiv(num_rows, entry["ROWS"]), triton.cdiv(length, entry["PIECE"]))](
        gate_up,
        out,
        scale,
        meeting_words(gate_up.device, pieces) if pieces > 1 else None,
        num_rows,
        gate_up.stride(-2),
        part_stride(gate_up),
        PARTS=parts,
        LENGTH=length,
        TURN=turn or length,
        CODED=coded,
        GELU=gelu,
        **entry,
    )
    return out, scale


def _entry(gpu: str, num_rows: int, length: int, parts: int, coded: bool) -> dict[str, Any]:
    """What a table or a formula says, and PIECE, the length that a program takes."""
    if not coded:
        entry = launch(tile("gated", gpu, piece_formula, num_rows))
        return {"PIECES": 1, "PIECE": entry["LANES"], **entry}
    op, formula = ("gated_codes", code_formula) if parts == 1 else ("gated_parts", part_formula)
    entry = row_tile(op, gpu, num_rows, length, formula)
    pieces = entry.get("PIECES", 1)
    piece = triton.cdiv(length, 16 * pieces) * 16  # starts where 16 bytes do
    assert pieces == 1 or num_rows * pieces <= MAX_PROGRAMS
    lanes = min(entry["LANES"], triton.next_power_of_2(piece))
    return {**entry, "PIECES": pieces, "PIECE": piece, "LANES": lanes}


def offline_variants() -> Iterator[Variant]:
    """Rows with codes, at the widths of published models, and pieces without."""
    signature = {
        "gate_up": "*bf16", "out": "*i8", "scales": "*fp32", "words": "*i64", "num_rows": "i32",
        "stride": "i32", "part_stride": "i32",
    }  # fmt: skip
    for length in (1536, 4864, 14336, 24576, 28672):
        for i, num_rows in enumerate(each_row_tile("gated_codes", length)):
            yield _variant(signature, num_rows, length, 1, i == 0, turn=64 if i else length)
        for num_rows in each_row_tile("gated_parts", length):
            yield _variant({**signature, "gate_up": "*fp32"}, num_rows, length, 4, False)
    plain = {**signature, "out": "*bf16", "scales": None}
    for num_rows in each_row("gated", MEASURED):
        yield _variant(plain, num_rows, 14336, 1, False)


def _variant(
    signature: Mapping[str, str | None],
    num_rows: int,
    length: int,
    parts: int,
    gelu: bool,
    turn: int | None = None,
) -> Variant:
    coded = signature["scales"] is not None
    entry = _entry(MEASURED, num_rows, length, parts, coded)
    absent = [name for name in ("scales",) if not coded] + ["words"] * (entry["PIECES"] == 1)
    shape = {"PARTS": parts, "LENGTH": length, "TURN": turn or length}
    constants = {**shape, "CODED": coded, "GELU": gelu, **dict.fromkeys(absent)}
    types = {name: kind for name, kind in signature.items() if name not in absent and kind is not None}
    name = f"gated {length} x {num_rows}, {parts} parts"
    return offline_row(name, _kernel, types, constants, entry, ("stride", "part_stride"))


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x))."""
    power = -LOG2E * x
    if ASM:
        return tl.inline_asm_elementwise(LOGISTIC, "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1)
    return 1.0 / (1.0 + tl.exp2(power))


@triton.jit
def _product(at, mask, part_stride, PARTS: tl.constexpr, TURN: tl.constexpr, GELU: tl.constexpr):
    """act(gate) * up in float32, of gates at `at`."""
    gate = load_sum(at, mask, part_stride, PARTS)
    up = load_sum(at + TURN, mask, part_stride, PARTS)
    slope = gate * (1.0 + 0.044715 * gate * gate) * GELU_SLOPE if GELU else gate
    return gate * _sigmoid(slope) * up


@triton.jit
def _spots(row, i, num_rows, LENGTH: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr):
    """Where in their rows the numbers i * LANES.. of this program lie, and which of them there are."""
    spot = i * LANES + tl.arange(0, LANES)
    lane = tl.program_id(1) * PIECE + spot
    return lane, (row < num_rows)[:, None] & ((spot < PIECE) & (lane < LENGTH))[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    gate_up,
    out,
    scales,
    words,
    num_rows,
    stride,
    part_stride,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    TURN: tl.constexpr,
    CODED: tl.constexpr,
    GELU: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    TYPE: tl.constexpr = out.dtype.element_ty
    STEPS: tl.constexpr = (PIECE + LANES - 1) // LANES
    take_turn(EARLY)
    meeting = meeting_of(words, PIECES) if PIECES > 1 else None
    products = ()
    for i in tl.static_range(STEPS):
        lane, mask = _spots(row, i, num_rows, LENGTH, PIECE, LANES)
        gates = lane if TURN == LENGTH else lane + lane // TURN * TURN
        at = gate_up + row[:, None] * stride + gates[None, :]
        # a tuple that grows while Triton unrolls the loop; mypy holds it to the length that it began with
        products += (_product(at, mask, part_stride, PARTS, TURN, GELU),)  # type: ignore[assignment]
    if CODED:
        bits = largest_of(products[STEPS - 1])
        for i in tl.static_range(STEPS - 1):
            bits = tl.maximum(bits, largest_of(products[i]))
        scale = agreed_scale(bits, meeting, words, TYPE, PIECES)
        if tl.program_id(1) == 0:
            tl.store(scales + row, scale, mask=row < num_rows)
    for i in tl.static_range(STEPS):
        lane, mask = _spots(row, i, num_rows, LENGTH, PIECE, LANES)
        values = codes(products[i], scale, TYPE) if CODED else products[i].to(TYPE)
        tl.store(out + row[:, None] * LENGTH + lane[None, :], values, mask=mask)
