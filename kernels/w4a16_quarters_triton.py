# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: RUF005  tuples of a kernel can be added up but not unpacked
"""The product with 4-bit weights for up to 128 tokens and weights of few rows (see quarters_triton.py).

Codes, scales and tokens come by the copy engine, into a ring of buffers that hold four steps of 128 inputs.
MODE is w4a16_product_triton.py's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.offline import Variant
from qinfer.kernels.quarters_triton import (
    GROUPS,
    OPTIONS,
    barriers,
    copy_tokens,
    meet,
    tiles_of,
    variant_of,
)
from qinfer.kernels.tiles import Tile
from qinfer.kernels.w4a16_floats_triton import WORDS, floats, pairs, scale_of, scales_of, words_of
from qinfer.kernels.warps_triton import (
    copy_in,
    descriptor,
    fill_buffers,
    flat_descriptor,
    flat_descriptor_type,
    group_barrier,
    tell_next,
)

WORDS_BLOCK, SCALES_BLOCK = [4 * GROUPS.value, 256], [GROUPS.value, 64]


@gluon.jit
def _copy_weight(step, stage, words, scale_zero, ws, ss, ready, row, tiles, NUM_BYTES: gl.constexpr):
    mbarrier.expect(ready.index(stage), NUM_BYTES)
    copy_in(words, [(row // 64 * tiles + step * GROUPS) * 4, 0], ready.index(stage), ws.index(stage))
    copy_in(scale_zero, [step * GROUPS, row], ready.index(stage), ss.index(stage))


@gluon.jit
def _copy(x, words, scale_zero, xs, ws, ss, ready, empty, row, token, tiles, BM: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    NUM_BYTES: gl.constexpr = (64 * 64 + 64 * 4 + BM * 256) * GROUPS
    fill_buffers(_copy_weight, (words, scale_zero, ws, ss, ready, row, tiles, NUM_BYTES), copy_tokens,
                 (x, xs, ready, token), empty, gl.cdiv(tiles, GROUPS), STAGES, True)  # fmt: skip


@gluon.jit
def _multiply(PART: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
              EARLY: gl.constexpr, xs, ws, ss, ready, empty, done, sums, out, M, N, row, token,
              tiles):  # fmt: skip
    """A multiplying group: of every four steps the one with its number."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    tell_next(EARLY == 1)
    acc = gl.zeros((64, BM), gl.float32, LAYOUT)
    for step in range(gl.cdiv(tiles, GROUPS)):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        both = scales_of(ss.index(stage), GROUPS * 64, PART)
        w = words_of(ws.index(stage).slice(PART * 4, 4))
        zero, scale = pairs(both, WORDS)
        tokens = xs.index(stage * GROUPS + PART)
        a = floats(w, zero, scale, MODE == 0, tokens.dtype, LAYOUT)
        if MODE == 0:
            acc = warpgroup_mma(a, tokens.permute((1, 0)), acc, is_async=True)
            acc, a = warpgroup_mma_wait(num_outstanding=0, deps=(acc, a))
        else:
            y = gl.zeros((64, BM), gl.float32, LAYOUT)
            y = warpgroup_mma(a, tokens.permute((1, 0)), y, use_acc=False, is_async=True)
            y, a = warpgroup_mma_wait(num_outstanding=0, deps=(y, a))
            acc += y * scale_of(both, tokens.dtype, LAYOUT)
        group_barrier()  # all four warps have read their words
        mbarrier.arrive(empty.index(stage))
    tell_next(EARLY == 2)
    meet(PART, acc, sums, done, out, token, row, M, N)


@gluon.jit(do_not_specialize=["M", "tiles", "blocks"])
def by_quarters(x, words, scale_zero, out, M, N, tiles, blocks, BM: gl.constexpr, STAGES: gl.constexpr,
                MODE: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """One program: 64 rows of weight by BM tokens; groups of 128 inputs.

    x [M, K] in blocks of [BM, 128]; words in flat blocks of [16, 256], scale_zero [K / 128, N] of [4, 64].
    """
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, 4 * GROUPS, 256], words.layout)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES, GROUPS, 64], scale_zero.layout)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [GROUPS - 1, 64, BM], LINES)
    ready, empty, done = barriers(STAGES, GROUPS)
    row = gl.program_id(0) // blocks * 64
    token = gl.program_id(0) % blocks * BM
    given = (xs, ws, ss, ready, empty, done, sums, out, M, N, row, token, tiles)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), BM, STAGES, MODE, EARLY) + given),
            (_multiply, (gl.constexpr(1), BM, STAGES, MODE, EARLY) + given),
            (_multiply, (gl.constexpr(2), BM, STAGES, MODE, EARLY) + given),
            (_multiply, (gl.constexpr(3), BM, STAGES, MODE, EARLY) + given),
            (_copy, (x, words, scale_zero, xs, ws, ss, ready, empty, row, token, tiles, BM, STAGES)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 32 if BM == 32 else 24],
    )


def launch_by_quarters(config: Tile, x: Tensor, words: Tensor, scale_zero: Tensor, out: Tensor) -> None:
    """Writes the product into out [T, N], by a row of the table that has QUARTERS."""
    (m, n), bm = out.shape, config["BM"]
    programs, blocks = tiles_of(m, n, bm)
    by_quarters[(programs,)](
        descriptor(x, [bm, 128]), flat_descriptor(words.view(-1, 256), WORDS_BLOCK),
        flat_descriptor(scale_zero, SCALES_BLOCK), out, m, n, words.shape[1], blocks, **_constants(config),
        **OPTIONS,
    )  # fmt: skip


def variant_by_quarters(config: Tile, element: str) -> Variant:
    """As it compiles for activations of "bf16" or "fp16"."""
    types = {
        "words": flat_descriptor_type("i32", WORDS_BLOCK),
        "scale_zero": flat_descriptor_type("i32", SCALES_BLOCK),
    }
    return variant_of("w4a16", by_quarters, config, element, types, _constants(config))


def _constants(config: Tile) -> dict[str, Any]:
    return {name: config[name] for name in ("BM", "STAGES", "MODE", "EARLY")}
