# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: RUF005  tuples of a kernel can be added up but not unpacked
"""The kernel of products with 8-bit weights on Hopper with one task per warp (see w4a16_warps_triton.py).

Codes become 16-bit floats as in w8a16_triton.py. Their scale is one for a row, by which
sums are multiplied in the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.w4a16_warps_triton import store_sums, store_tile
from qinfer.kernels.w8a16_widen_triton import (
    E4M3_TO_BFLOAT16,
    E4M3_TO_FLOAT16,
    INT8_TO_BFLOAT16,
    INT8_TO_FLOAT16,
)
from qinfer.kernels.warps_triton import copy_in, fill_buffers, group_barrier, tell_next

# of [64, 32], 64 rows of 128 inputs: a thread has the eight words of two rows whose codes it will multiply
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 32],
    )
)  # fmt: skip


@gluon.jit
def _place(M, steps, BM: gl.constexpr, BN: gl.constexpr):
    """First token, first row of weight and the steps of this program, a tile and a part of the inputs."""
    blocks = gl.cdiv(M, BM)
    part = gl.program_id(1)
    parts = gl.num_programs(1)
    token = gl.program_id(0) % blocks * BM
    return token, gl.program_id(0) // blocks * BN, part * steps // parts, (part + 1) * steps // parts


@gluon.jit
def _copy_weight(step, stage, low, w, ws, ready, N, row, NUM_BYTES: gl.constexpr, BN: gl.constexpr):
    BLOCK: gl.constexpr = ws.shape[1]
    mbarrier.expect(ready.index(stage), NUM_BYTES)
    for i in gl.static_range(BN // BLOCK):
        at = (low + step) * N + row + i * BLOCK
        copy_in(w, [at, 0], ready.index(stage), ws.index(stage * (BN // BLOCK) + i))


@gluon.jit
def _copy_tokens(step, stage, low, x, xs, ready, token):
    copy_in(x, [token, (low + step) * 128], ready.index(stage), xs.index(stage))


@gluon.jit
def _copy(x, w, xs, ws, ready, empty, M, N, steps, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
          EARLY: gl.constexpr):  # fmt: skip
    NUM_BYTES: gl.constexpr = BN * 128 + BM * 256
    token, row, low, high = _place(M, steps, BM, BN)
    fill_buffers(_copy_weight, (low, w, ws, ready, N, row, NUM_BYTES, BN), _copy_tokens,
                 (low, x, xs, ready, token), empty, high - low, STAGES, EARLY)  # fmt: skip


@gluon.jit
def floats(words, FP8: gl.constexpr, WIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, 16 R] -> their codes, [64, 64 R] as the tensor cores want them."""
    RUNS: gl.constexpr = words.shape[1] // 16
    if WIDE == gl.bfloat16:  # noqa: SIM300
        a00, a01, a10, a11 = gl.inline_asm_elementwise(
            E4M3_TO_BFLOAT16 if FP8 else INT8_TO_BFLOAT16, "=h,=h,=h,=h,r", [words], is_pure=True, pack=1,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        )  # fmt: skip
    else:
        a00, a01, a10, a11 = gl.inline_asm_elementwise(
            E4M3_TO_FLOAT16 if FP8 else INT8_TO_FLOAT16, "=h,=h,=h,=h,r", [words], is_pure=True, pack=1,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        )  # fmt: skip
    tile = gl.join(gl.join(a00, a10), gl.join(a01, a11)).reshape((64, RUNS, 4, 4, 2, 2))  # 64s, t, s, h, p
    tile = tile.permute((0, 1, 3, 4, 2, 5)).reshape((64, 64 * RUNS))
    return gl.convert_layout(tile, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _add(acc, words, tokens, FP8: gl.constexpr):
    """acc [64, M] plus the product of words and tokens [M, inputs]."""
    LAYOUT: gl.constexpr = acc.type.layout
    a = floats(words, FP8, tokens.dtype, LAYOUT)
    acc = warpgroup_mma(a, tokens.permute((1, 0)), acc, is_async=True)
    acc, a = warpgroup_mma_wait(num_outstanding=0, deps=(acc, a))
    return acc


@gluon.jit
def _multiply(PART: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
              BIAS: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr, xs, ws, ready, empty, scale, bias,
              out, M, N, steps):  # fmt: skip
    """A multiplying group: rows PART * 64.. of its program's tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    BLOCK: gl.constexpr = ws.shape[1]
    FACTOR: gl.constexpr = 256.0 if FP8 and xs.dtype == gl.float16 else 1.0
    token, row, low, high = _place(M, steps, BM, BN)
    row += PART * 64
    tell_next(EARLY == 1)
    line = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    factor = gl.load(scale + line, mask=line < N, other=0.0).to(gl.float32) * FACTOR
    acc = gl.zeros((64, BM), gl.float32, LAYOUT)
    for i in range(high - low):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        block = ws.index(stage * (BN // BLOCK) + PART * 64 // BLOCK)
        words = block.slice(PART * 64 % BLOCK, 64).load(WORDS)
        if BM < 128:
            acc = _add(acc, words, xs.index(stage), FP8)
        else:  # by halves, which need fewer registers
            first, last = words.reshape((64, 2, 16)).permute((0, 2, 1)).split()
            acc = _add(acc, first, xs.index(stage).slice(0, 64, dim=1), FP8)
            acc = _add(acc, last, xs.index(stage).slice(64, 64, dim=1), FP8)
        group_barrier()  # all four warps have read their words
        mbarrier.arrive(empty.index(stage))
    tell_next(EARLY == 2)
    acc = acc * factor[:, None]
    if out.dtype.element_ty == xs.dtype:
        if BIAS:
            acc += gl.load(bias + line, mask=line < N, other=0.0).to(gl.float32)[:, None]
        store_tile(acc.to(xs.dtype), out, token, row, M, N)
    else:
        store_sums(acc, out + gl.program_id(1).to(gl.int64) * M * N, token, row, M, N)


@gluon.jit(do_not_specialize=["M", "steps"])
def by_warps(x, w, scale, bias, out, M, N, steps, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
             BIAS: gl.constexpr, FP8: gl.constexpr, EARLY: gl.constexpr,
             REGISTERS: gl.constexpr):  # fmt: skip
    """As `product` in w8a16_triton.py, with its grid; BN is 128, 192 or 256: 64 rows for a multiplying group.

    x [M, K] in blocks of [BM, 128] and the words as int32 [rows, 32] in blocks of
    [block_rows(BN), 32]: descriptors. REGISTERS: of a thread that multiplies.
    """
    BLOCKS: gl.constexpr = BN // w.block_shape[0]
    SKIP: gl.constexpr = 4 - BN // 64  # of the groups below: a tile of 256 rows has them all
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, w.block_shape[0], 32], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=BN // 64)
    fence_async_shared()
    given = (xs, ws, ready, empty, scale, bias, out, M, N, steps)
    gl.warp_specialize(
        [
            (_multiply, (0 - SKIP, BM, BN, STAGES, BIAS, FP8, EARLY) + given),
            (_multiply, (1 - SKIP, BM, BN, STAGES, BIAS, FP8, EARLY) + given),
            (_multiply, (2 - SKIP, BM, BN, STAGES, BIAS, FP8, EARLY) + given),
            (_multiply, (3 - SKIP, BM, BN, STAGES, BIAS, FP8, EARLY) + given),
            (_copy, (x, w, xs, ws, ready, empty, M, N, steps, BM, BN, STAGES, EARLY)),
        ][SKIP:],
        [4, 4, 4, 1][SKIP:],
        [REGISTERS, REGISTERS, REGISTERS, 24][SKIP:],
    )


def block_rows(bn: int) -> int:
    """Rows of weight that are copied at once: a power of two, as shared memory's blocks are."""
    return 256 if bn == 256 else 64


def registers_of(bm: int, bn: int) -> dict[str, int | None]:
    """Registers for `by_warps` with these tiles: what a thread has that multiplies, and one at the start.

    Small tiles leave the next kernel half of the registers, as it may start meanwhile.
    """
    if bn == 128 and bm < 128:
        return {"REGISTERS": 104, "maxnreg": 80}
    return {"REGISTERS": {128: 160, 192: 144, 256: 112}[bn], "maxnreg": None}
