# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What products that are cut into pieces share on a GPU (see pieces.py): who has what, and the adding up.

Adding is a kernel of its own. The piece that comes last could do it, but would read all others through one
multiprocessor while the rest wait, which took 2 to 5 us longer (H200). The extra launch is nearly free by
programmatic dependent launch: a kernel may start once all programs of the one before have called
`gdc_launch_dependents`, and it waits in `gdc_wait` before it reads what another kernel writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.offline import Variant
from qinfer.kernels.pieces import Cut

BLOCK = 512


def workspace(cut: Cut, tile: int, device: torch.device) -> Tensor:
    """float32: two tiles of `tile` elements for each piece, which may lie in two tiles of the output."""
    return torch.empty(2 * cut.pieces * tile, dtype=torch.float32, device=device)


def add_up(
    parts: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cut: Cut,
    steps: int,
    blocks: int,
    tile: tuple[int, int],
) -> None:
    """Writes the tiles of out [M, N] that were cut: the sums of their pieces in `parts`, plus bias [N].

    tile: tokens and rows of weight of one; blocks: tiles along the tokens; steps: of a tile.
    """
    (m, n), (bm, bn) = out.shape, tile
    rest = triton.cdiv(n, bn) * blocks - cut.whole
    chunks = triton.cdiv(min(m, bm) * bn, min(BLOCK, bm * bn))
    many = steps * rest // cut.pieces * 3 < steps  # more than three pieces of a tile
    add_pieces[(rest * chunks,)](
        parts, out if bias is None else bias, out, m, n, rest, steps, blocks, cut.whole, cut.pieces, chunks,
        BM=bm, BN=bn, BLOCK=min(BLOCK, bm * bn), BATCH=8 if many else 4, BIAS=bias is not None,
        EARLY=out.is_cuda, num_warps=4, launch_pdl=out.is_cuda,
    )  # fmt: skip


@triton.jit
def first_unit(piece, units, pieces):
    """Where a piece starts on the line of `units` steps; the first few pieces have one step more."""
    return piece * (units // pieces) + tl.minimum(piece, units % pieces)


@triton.jit
def piece_of(unit, units, pieces):
    """The piece that has a step."""
    length = units // pieces
    longer = units % pieces
    beyond = unit - longer * (length + 1)
    return tl.where(beyond < 0, unit // (length + 1), longer + beyond // length)


@triton.jit
def share(pid, tiles, steps, whole, pieces):
    """The steps of a program, (low, high), counted over all tiles: step s of tile t is t * steps + s."""
    units = (tiles - whole) * steps
    piece = pid - whole
    some = tl.maximum(pieces, 1)
    low = tl.where(piece < 0, pid * steps, whole * steps + first_unit(piece, units, some))
    high = tl.where(piece < 0, low + steps, whole * steps + first_unit(piece + 1, units, some))
    return low, high


@triton.jit
def fetch_ahead(at, num_bytes):
    """Asks the L2 cache for num_bytes, a multiple of 16, from pointer `at` on; the first thread does."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r",
        [at.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M", "rest", "steps", "blocks", "whole", "pieces", "chunks"])
def add_pieces(parts, bias, out, M, N, rest, steps, blocks, whole, pieces, chunks, BM: tl.constexpr,
               BN: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr, BIAS: tl.constexpr,
               EARLY: tl.constexpr):  # fmt: skip
    """Program (tile, chunk): BLOCK elements of a tile of out [M, N]; parts [pieces, 2, BM, BN] float32."""
    if EARLY:
        cuda.gdc_launch_dependents()
    tile = tl.program_id(0) // chunks
    spot = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    token = (whole + tile) % blocks * BM + spot // BN
    row = (whole + tile) // blocks * BN + spot % BN
    inside = (token < M) & (row < N)
    units = rest * steps
    first = piece_of(tile * steps, units, pieces)
    last = piece_of(tile * steps + steps - 1, units, pieces)
    second = (first_unit(first, units, pieces) < tile * steps).to(tl.int32)  # this is its second tile
    if EARLY:
        cuda.gdc_wait()
    y = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last + 1, BATCH):
        for j in tl.static_range(BATCH):
            piece = start + j
            slot = 2 * piece + tl.where(piece == first, second, 0)
            there = inside & (spot < (last + 1 - piece) * (BM * BN))  # all or none
            y += tl.load(parts + slot * (BM * BN) + spot, mask=there, other=0.0)
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + row, y.to(out.dtype.element_ty), mask=inside)


def adding_variant(tile: tuple[int, int], dtype: str) -> Variant:
    """`add_pieces` as it compiles for tiles of (tokens, rows) and results of `dtype` ("bf16")."""
    signature = dict.fromkeys(add_pieces.arg_names[3:11], "i32")
    signature |= {"parts": "*fp32", "bias": f"*{dtype}", "out": f"*{dtype}"}
    bm, bn = tile
    block = min(BLOCK, bm * bn)
    constants = {"BM": bm, "BN": bn, "BLOCK": block, "BATCH": 8, "BIAS": False, "EARLY": True}
    ordered = {name: signature[name] for name in add_pieces.arg_names if name in signature}
    options = {"num_warps": 4, "launch_pdl": True}
    return Variant(f"add_pieces {bm}x{bn} {dtype}", add_pieces, ordered, constants, options, ("N",))
