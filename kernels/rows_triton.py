# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the row-wise kernels share: a row's largest magnitude, its 8-bit codes, and how they are launched.

A row lies in the registers of one program, so whatever needs a sum or a maximum over it reads memory once.

Rows that hold NaN must not come out as numbers. The hardware's maximum of floats ignores NaN; that of their
bits does not, where NaN lies above infinity, and it takes fewer instructions across threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.offline import Variant
from qinfer.kernels.tiles import Declined, Tile, each_row, gpu_key, tile

SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
INT8_MAX = tl.constexpr(127.0)
FP8_MAX = tl.constexpr(448.0)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to an integer, ties to even
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ASM = tl.constexpr(not INTERPRETED)  # the interpreter knows no assembly
CODES = (torch.int8, torch.float8_e4m3fn)
MAX_LANES = 32768  # of a program's rows: 32 numbers for each of 1024 threads
MEASURED = "nvidia-h200"  # the GPU whose table `offline_variants` look into
MAX_PROGRAMS = 528  # that may meet: four for each multiprocessor of an H200
MAX_PARTS = 16  # partial sums whose loads are issued together


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Waits for the kernel in front. The next one may start before that (EARLY 1), or only after it (2).

    A product that starts then asks for its weight just when nobody else wants the memory.
    """
    if EARLY == 1:
        cuda.gdc_launch_dependents()
    if EARLY > 0:
        cuda.gdc_wait()
    if EARLY == 2:
        cuda.gdc_launch_dependents()


@triton.jit
def row_scale(x, TYPE: tl.constexpr):
    """x [ROWS, LANES] float32 -> the scale of each row's codes of TYPE, as `quantize_per_token` has it."""
    return scale_of(largest_of(x), TYPE)


@triton.jit
def largest_of(x):
    """Bits of each row's largest magnitude."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1)


@triton.jit
def scale_of(bits, TYPE: tl.constexpr):
    """The scale of the codes of rows whose largest magnitudes have these bits."""
    largest = bits.to(tl.float32, bitcast=True)
    limit: tl.constexpr = INT8_MAX if TYPE == tl.int8 else FP8_MAX  # noqa: SIM300
    scale = tl.div_rn(largest, limit)
    return tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)  # NaN stays


@triton.jit
def meeting_of(words, PIECES: tl.constexpr):
    """The number of this meeting of a row's programs (grid: rows, PIECES), from this program's word."""
    return (tl.load(words + tl.program_id(0) * PIECES + tl.program_id(1)) >> 32).to(tl.int32) + 1


@triton.jit
def _agreed(bits, meeting, words, PIECES: tl.constexpr):
    """The largest `bits` [1] of a row's programs, which all wait here until each has told its own.

    A program tells it in its word, (number of the meeting, bits), which one store changes at once. All
    programs of the launch must fit the GPU together; the next launch comes when all of them have ended.
    """
    words += tl.program_id(0) * PIECES
    told = (meeting.to(tl.int64) << 32) | tl.max(bits, 0).to(tl.int64)
    tl.atomic_xchg(words + tl.program_id(1), told, sem="relaxed")
    words += tl.arange(0, PIECES)
    heard = tl.load(words, volatile=True)
    while tl.max(((heard >> 32).to(tl.int32) != meeting).to(tl.int32), 0) > 0:
        heard = tl.load(words, volatile=True)
    return tl.max(heard.to(tl.int32), 0) + tl.zeros_like(bits)


@triton.jit
def agreed_scale(bits, meeting, words, TYPE: tl.constexpr, PIECES: tl.constexpr):
    """The scale of rows whose largest magnitudes have these bits.

    PIECES: that many programs hold a row (ROWS is 1), each with its own largest; they have a meeting.
    """
    return scale_of(_agreed(bits, meeting, words, PIECES) if PIECES > 1 else bits, TYPE)


@triton.jit
def codes(x, scale, TYPE: tl.constexpr):
    """x [ROWS, LANES] float32 -> codes of TYPE, int8 or e4m3."""
    x = x * (1.0 / scale)[:, None]
    if TYPE == tl.int8:  # noqa: SIM300
        return (x + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)  # the sum's last bits are the integer
    else:  # past the largest finite number the interpreter's cast makes NaN
        return tl.clamp(x, -FP8_MAX, FP8_MAX).to(TYPE)


@triton.jit
def load_sum(pointers, mask, part_stride, PARTS: tl.constexpr):
    """The sum over PARTS partial sums, in their order, in float32."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(pointers + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return x


def row_tile(
    op: str, gpu: str, num_rows: int, length: int, formula: Callable[[int, int], Tile]
) -> dict[str, Any]:
    """ROWS, LANES and launch options for rows of `length`; `Declined` where a row does not fit a program.

    `formula` makes them from (number of rows, LANES) where no table has them.
    """
    lanes = triton.next_power_of_2(length)
    if lanes > MAX_LANES:
        raise Declined(f"rows of {length} numbers; a program holds up to {MAX_LANES}")
    entry = tile(_name(op, length), gpu, lambda m, n, k: formula(m, lanes), num_rows)
    return {"LANES": lanes, **launch(entry)}


def each_row_tile(op: str, length: int) -> list[int]:
    """A number of rows for each entry that the table of `offline_variants` has for rows of `length`."""
    return each_row(_name(op, length), MEASURED)


def _name(op: str, length: int) -> str:
    """Of an op's table for rows of `length`."""
    lanes = triton.next_power_of_2(length)
    size = lanes * 3 // 4 if lanes == MAX_LANES and length <= lanes * 3 // 4 else lanes
    return f"{op} {size}"


def row_formula(num_rows: int, lanes: int) -> Tile:
    """One row per program; few rows get many threads each, for then nobody else needs them."""
    warps = lanes // 256 if num_rows <= 512 else lanes // 2048
    return {"ROWS": 1, "num_warps": max(4 if lanes >= 512 else 1, min(16, warps)), "EARLY": 2}


def launch(entry: Tile) -> dict[str, Any]:
    """A table's entry as launch options. EARLY: the kernel may start early; inside it waits for its turn.

    So a chain of norms, activations and roundings takes 1.4 us an op at one token instead of 2.0 (H200). In a
    model products follow: a step of one sequence took 2569 us with EARLY 2 for all, 2614 with EARLY 1 (8B,
    float8); tables have 1 where it was better for one of them.
    """
    if INTERPRETED:  # there is no other kernel
        return {**entry, "EARLY": 0}
    return {**entry, "launch_pdl": True} if entry["EARLY"] else dict(entry)


def offline_row(
    name: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    entry: Tile,
    aligned: tuple[str, ...],
) -> Variant:
    """The variant of a row-wise kernel that `entry` launches."""
    tile_constants = {key: value for key, value in entry.items() if key.isupper()}
    options = {key: value for key, value in entry.items() if key not in tile_constants}
    return Variant(name, kernel, signature, {**constants, **tile_constants}, options, aligned)


@cache
def meeting_words(device: torch.device, pieces: int) -> Tensor:
    """The words of `_agreed` for rows in `pieces`: for launches of one stream, one after the other."""
    return torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=device)


@cache
def table_of(device: torch.device) -> str:
    """Name of the table of tiles for a device."""
    return gpu_key(torch.cuda.get_device_name(device)) if device.type == "cuda" else "interpreter"


def as_parts(x: Tensor) -> tuple[Tensor, int]:
    """x [T, N] or partial sums [S, T, N] with adjacent numbers, and S; `Declined` for too many parts."""
    parts = x.shape[0] if x.dim() == 3 else 1
    if parts > MAX_PARTS:
        raise Declined(f"{parts} partial sums; the kernel adds up to {MAX_PARTS}")
    return x if x.stride(-1) == 1 else x.contiguous(), parts


def part_stride(x: Tensor) -> int:
    """Elements between partial sums."""
    return x.stride(0) if x.dim() == 3 else 0
