# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: RUF005  tuples of a kernel can be added up but not unpacked
"""The product with 8-bit weights for up to 128 tokens and weights of few rows (see quarters_triton.py)."""

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
from qinfer.kernels.w8a16_warps_triton import WORDS, floats
from qinfer.kernels.warps_triton import (
    copy_in,
    descriptor,
    fill_buffers,
    flat_descriptor,
    flat_descriptor_type,
    group_barrier,
    seen_as,
    tell_next,
)

WORDS_BLOCK = [8, 256]


@gluon.jit
def _copy_weight(step, stage, words, ws, ready, row, N, NUM_BYTES: gl.constexpr, GROUPS: gl.constexpr):
    mbarrier.expect(ready.index(stage), NUM_BYTES)
    for i in gl.static_range(GROUPS):
        at = ((step * GROUPS + i) * N + row) // 8
        copy_in(words, [at, 0], ready.index(stage), ws.index(stage * GROUPS + i))


@gluon.jit
def _copy(x, words, xs, ws, ready, empty, row, token, panels, N, BM: gl.constexpr, STAGES: gl.constexpr,
          GROUPS: gl.constexpr):  # fmt: skip
    NUM_BYTES: gl.constexpr = (64 * 128 + BM * 256) * GROUPS
    fill_buffers(_copy_weight, (words, ws, ready, row, N, NUM_BYTES, GROUPS), copy_tokens,
                 (x, xs, ready, token), empty, gl.cdiv(panels, GROUPS), STAGES, True)  # fmt: skip


@gluon.jit
def _multiply(PART: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
              BIAS: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr, xs, ws, ready, empty, done, sums,
              scale, bias, out, M, N, row, token, panels):  # fmt: skip
    """A multiplying group: of every GROUPS steps the one with its number."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FACTOR: gl.constexpr = 256.0 if FP8 and xs.dtype == gl.float16 else 1.0
    tell_next(EARLY == 1)
    line = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    factor = gl.load(scale + line, mask=line < N, other=0.0).to(gl.float32) * FACTOR
    acc = gl.zeros((64, BM), gl.float32, LAYOUT)
    for step in range(gl.cdiv(panels, GROUPS)):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        w = seen_as(ws.index(stage * GROUPS + PART), gl.int32, [64, 32], LINES).load(WORDS)
        tokens = xs.index(stage * GROUPS + PART)
        a = floats(w, FP8, tokens.dtype, LAYOUT)
        acc = warpgroup_mma(a, tokens.permute((1, 0)), acc, is_async=True)
        acc, a = warpgroup_mma_wait(num_outstanding=0, deps=(acc, a))
        group_barrier()  # all four warps have read their words
        mbarrier.arrive(empty.index(stage))
    tell_next(EARLY == 2)
    acc = acc * factor[:, None]
    if BIAS and PART == 0:
        acc += gl.load(bias + line, mask=line < N, other=0.0).to(gl.float32)[:, None]
    meet(PART, acc, sums, done, out, token, row, M, N)


@gluon.jit(do_not_specialize=["M", "panels", "blocks"])
def by_quarters(x, words, scale, bias, out, M, N, panels, blocks, BM: gl.constexpr, STAGES: gl.constexpr,
                GROUPS: gl.constexpr, BIAS: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr,
                REGISTERS: gl.constexpr):  # fmt: skip
    """One program: 64 rows of weight by BM tokens. GROUPS: 4 or 2, with REGISTERS for a thread.

    x [M, K] in blocks of [BM, 128], the words [panels, N, 32] in flat blocks of [8, 256]: descriptors.
    """
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS, 8, 256], words.layout)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [GROUPS - 1, 64, BM], LINES)
    ready, empty, done = barriers(STAGES, GROUPS)
    SKIP: gl.constexpr = 4 - GROUPS
    row = gl.program_id(0) // blocks * 64
    token = gl.program_id(0) % blocks * BM
    given = (xs, ws, ready, empty, done, sums, scale, bias, out, M, N, row, token, panels)
    gl.warp_specialize(
        [
            (_multiply, (0 - SKIP, BM, STAGES, GROUPS, BIAS, FP8, EARLY) + given),
            (_multiply, (1 - SKIP, BM, STAGES, GROUPS, BIAS, FP8, EARLY) + given),
            (_multiply, (2 - SKIP, BM, STAGES, GROUPS, BIAS, FP8, EARLY) + given),
            (_multiply, (3 - SKIP, BM, STAGES, GROUPS, BIAS, FP8, EARLY) + given),
            (_copy, (x, words, xs, ws, ready, empty, row, token, panels, N, BM, STAGES, GROUPS)),
        ][SKIP:],
        [4, 4, 4, 1][SKIP:],
        [REGISTERS, REGISTERS, REGISTERS, 24][SKIP:],
    )


def launch_by_quarters(
    entry: Tile, x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, fp8: bool
) -> None:
    """Writes the product into out [M, N], by a row of the table that has QUARTERS."""
    (m, n), bm = out.shape, entry["BM"]
    programs, blocks = tiles_of(m, n, bm)
    by_quarters[(programs,)](
        descriptor(x, [bm, 128]), flat_descriptor(words.view(-1, 256), WORDS_BLOCK), scale,
        scale if bias is None else bias, out, m, n, words.shape[0], blocks,
        **_constants(entry, bias is not None, fp8), **_options(entry),
    )  # fmt: skip


def variant_by_quarters(op: str, entry: Tile, element: str) -> Variant:
    """As it compiles for activations of "bf16" or "fp16"."""
    types = {"words": flat_descriptor_type("i32", WORDS_BLOCK), "scale": "*fp32", "bias": "*fp32"}
    constants = _constants(entry, False, op == "w8a16_fp8")
    return variant_of(op, by_quarters, entry, element, types, constants)._replace(options=_options(entry))


def _constants(entry: Tile, bias: bool, fp8: bool) -> dict[str, Any]:
    named = {name: entry[name] for name in ("BM", "STAGES", "EARLY")}
    groups = _groups(entry)
    registers = 112 if groups == 4 else 104
    return {**named, "GROUPS": groups, "BIAS": bias, "FP8": fp8, "REGISTERS": registers}


def _options(entry: Tile) -> dict[str, Any]:
    """Two groups leave the next kernel half of the registers, as it may start meanwhile."""
    return {**OPTIONS, "maxnreg": 80 if _groups(entry) == 2 else None}


def _groups(entry: Tile) -> int:
    return int(entry.get("GROUPS", GROUPS.value))
