# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The kernel of products with 4-bit weights.

The weight is the first operand of the tensor core and the tokens, transposed, the second: 64 rows of weight
fill it however few tokens there are. Codes come in fragment order (see w4a16.py), so the loop copies them to
shared memory, reads 16 bytes a thread and turns them into floats in place (see w4a16_unpack_triton.py): no
value crosses threads. The idea is Marlin's (Frantar et al., 2024).

MODE says where a group's scale goes:
    0   into the weight, rounded to 16 bits; one running sum
    1   onto the group's sum, in float32: the weight stays exact, and few tokens need fewer instructions

A program has one tile of output, or an equal share of the steps of several (see pieces.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from qinfer.kernels.pieces_triton import fetch_ahead, share
from qinfer.kernels.w4a16_unpack_triton import (
    TILE_WORDS,
    group_scale,
    load_scale_zero,
    pairs_first,
    weight_tile,
)


@triton.jit
def _load(x, xp, wp, scale_zero, rows, first, g, M, K, tiles, scale_stride, BM: tl.constexpr,
          GROUP: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Tile g: tokens [BM, 128], zero beyond M and K; words [BN, 16], scales; beyond the last tile its own."""
    if TMA:
        a = x.load([first, g * 128])
    else:
        inside = (first + tl.arange(0, BM) < M)[:, None]
        if not EVEN:
            inside = inside & (g * 128 + tl.arange(0, 128) < K)[None, :]
        a = tl.load(xp + g * 128, mask=inside, other=0.0)
    if not EVEN:
        g = tl.minimum(g, tiles - 1)
    return a, tl.load(wp + g * TILE_WORDS), load_scale_zero(scale_zero, rows, g, scale_stride, GROUP)


@triton.jit
def _add(total, a, w, both, MODE: tl.constexpr, PAIRS_FIRST: tl.constexpr, SCALE: tl.constexpr,
         COMPUTE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """total [BN, BM] plus a tile's product."""
    tokens = tl.trans(a)
    if PAIRS_FIRST:
        tokens = pairs_first(tokens)
    if MODE == 1:
        weight = weight_tile(w, both, False, PAIRS_FIRST, False, SCALE, COMPUTE, ASM)
        total += tl.dot(weight, tokens) * group_scale(both, SCALE)[:, None]
    else:
        weight = weight_tile(w, both, True, PAIRS_FIRST, not PAIRS_FIRST, SCALE, COMPUTE, ASM)
        total = tl.dot(weight, tokens, total)
    return total


@triton.jit(do_not_specialize=["M", "tiles", "blocks", "whole", "pieces", "ahead", "early"])
def product(x, words, scale_zero, out, parts, M, N, K, x_stride, scale_stride, tiles, blocks, whole, pieces,
            ahead, early, BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, PAIRS_FIRST: tl.constexpr,
            UNROLL: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
            STAGES: tl.constexpr, SCALE: tl.constexpr, COMPUTE: tl.constexpr, ASM: tl.constexpr,
            PARTS: tl.constexpr):  # fmt: skip
    """One program: an output tile, BN rows of weight by BM tokens, or a piece of one or two (pieces.py).

    tiles: of 128 inputs; parts: float32 [pieces, 2, BM, BN], sums of pieces, which another kernel adds. Where
    PARTS is not 0, all tiles are cut into as many, and parts is float32 [PARTS, M, N].
    """
    pid = tl.program_id(0)
    steps = tl.cdiv(tiles, UNROLL)
    low, high = share(pid, tl.cdiv(N, BN) * blocks, steps, whole, pieces)
    first_tile = low // steps
    i, m = tl.arange(0, BN), tl.arange(0, BM)
    if ASM:
        g = low % steps * UNROLL
        ready = words + (first_tile // blocks * BN // 64).to(tl.int64) * tiles * TILE_WORDS + g * TILE_WORDS
        size = tl.minimum(tl.minimum(ahead, (high - low) * UNROLL), tiles - g) * (TILE_WORDS * 4)
        if ahead > 0:
            for block in tl.static_range((BN + 63) // 64):
                fetch_ahead(ready + tl.cast(block * TILE_WORDS, tl.int64) * tiles, size)
        cuda.gdc_wait()
        if early == 1:
            cuda.gdc_launch_dependents()
    for tile in range(first_tile, (high - 1) // steps + 1):
        lo, hi = tl.maximum(low - tile * steps, 0), tl.minimum(high - tile * steps, steps)
        row, first = tile // blocks * BN, tile % blocks * BM
        rows = row + i
        at = words + (row // 64).to(tl.int64) * tiles * TILE_WORDS + row % 64 * 16
        wp = at + (i // 64 * (tiles * TILE_WORDS) + i % 64 * 16)[:, None] + tl.arange(0, 16)[None, :]
        xp = x
        if not TMA:
            xp = x + (first + m).to(tl.int64)[:, None] * x_stride + tl.arange(0, 128)[None, :]
        total = tl.zeros((BN, BM), tl.float32)
        for step in tl.range(lo, hi, num_stages=STAGES):
            a, w, both = _load(x, xp, wp, scale_zero, rows, first, step * UNROLL, M, K, tiles, scale_stride,
                               BM, GROUP, EVEN, TMA)  # fmt: skip
            if UNROLL == 2:
                a2, w2, both2 = _load(x, xp, wp, scale_zero, rows, first, step * 2 + 1, M, K, tiles,
                                      scale_stride, BM, GROUP, EVEN, TMA)  # fmt: skip
            total = _add(total, a, w, both, MODE, PAIRS_FIRST, SCALE, COMPUTE, ASM)
            if UNROLL == 2:
                total = _add(total, a2, w2, both2, MODE, PAIRS_FIRST, SCALE, COMPUTE, ASM)
        if ASM:  # noqa: SIM102  the one is known when this is compiled
            if (early == 2) & (high <= (tile + 1) * steps):
                cuda.gdc_launch_dependents()
        if PARTS > 0:
            _store(parts + (pid % PARTS).to(tl.int64) * M * N, total, row, first, M, N)
        elif pid < whole:
            _store(out, total, row, first, M, N)
        else:
            part = parts + (2 * (pid - whole) + tile - first_tile) * (BM * BN)
            tl.store(part + m[None, :] * BN + i[:, None], total)


@triton.jit
def _store(out, total, row, first, M, N):
    """total [BN, BM] to out[first :, row :], [M, N]."""
    rows = row + tl.arange(0, total.shape[0])
    tokens = first + tl.arange(0, total.shape[1])
    where = out + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=(tokens < M)[None, :] & (rows < N)[:, None])
