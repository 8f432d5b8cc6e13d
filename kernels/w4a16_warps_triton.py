# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: RUF005  tuples of a kernel can be added up but not unpacked
"""The kernel of products with 4-bit weights on Hopper with one task per warp (see warps_triton.py).

One warp copies ahead into a ring of buffers in shared memory, and begins with the weight before the kernel in
front has ended; each group of four warps turns the codes of 64 rows into floats in registers and multiplies
them. While one does the former the tensor cores work for another, so nobody need take both at once.

Tiles are 256 rows high, one a multiprocessor: copies of the tokens from the L2 cache take long where there
are many, and every tile fetches them again. Or they are 128 rows high, two a multiprocessor, where few rows
would leave some without work. Scales come with the codes: loaded by the groups one step before their use,
they set the pace, for memory takes as long as a step (H200, 16 tokens of 28672x4096: 26.6 us against 21.8).

Pieces are cut as in w4a16_product_triton.py, whose MODE and UNROLL these are too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.w4a16_floats_triton import (
    WORDS,
    floats,
    halves,
    pairs,
    quarter,
    scale_of,
    scales_of,
    words_of,
)
from qinfer.kernels.warps_triton import copy_in, fill_buffers, group_barrier, tell_next


@gluon.jit
def _share(tiles, steps, whole, pieces):
    """The steps of this program, as `share` in pieces_triton.py."""
    units = (tiles - whole) * steps
    some = gl.maximum(pieces, 1)
    length = units // some
    longer = units % some
    piece = gl.program_id(0) - whole
    low = whole * steps + piece * length + gl.minimum(piece, longer)
    high = low + length + (piece < longer).to(gl.int32)
    is_whole = piece < 0
    low = gl.where(is_whole, gl.program_id(0) * steps, low)
    return low, gl.where(is_whole, low + steps, high)


@gluon.jit
def _copy_weight(step, stage, low, words, scale_zero, ws, ss, ready, steps, tiles, blocks,
                 NUM_BYTES: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr,
                 PER_GROUP: gl.constexpr):  # fmt: skip
    mbarrier.expect(ready.index(stage), NUM_BYTES)
    first = (low + step) // steps // blocks * (BN // 64)
    tile = (low + step) % steps * UNROLL
    for i in gl.static_range(BN // 64):
        at = ((first + i) * tiles + tile) * 4
        copy_in(words, [at, 0], ready.index(stage), ws.index(stage * (BN // 64) + i))
    for i in gl.static_range(UNROLL):
        at = (tile + i) // PER_GROUP
        copy_in(scale_zero, [at, first * 64], ready.index(stage), ss.index(stage * UNROLL + i))


@gluon.jit
def _copy_tokens(step, stage, low, x, xs, ready, steps, blocks, BM: gl.constexpr, UNROLL: gl.constexpr):
    unit = low + step
    for i in gl.static_range(UNROLL):
        at = [unit // steps % blocks * BM, (unit % steps * UNROLL + i) * 128]
        copy_in(x, at, ready.index(stage), xs.index(stage * UNROLL + i))


@gluon.jit
def _copy(BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr,
          GROUP: gl.constexpr, x, words, scale_zero, xs, ws, ss, ready, empty, N, tiles, blocks, whole,
          pieces):  # fmt: skip
    NUM_BYTES: gl.constexpr = (BN * 64 + BN * 4 + BM * 256) * UNROLL
    steps = gl.cdiv(tiles, UNROLL)
    low, high = _share(gl.cdiv(N, BN) * blocks, steps, whole, pieces)
    PER_GROUP: gl.constexpr = GROUP // 128
    fill_buffers(
        _copy_weight, (low, words, scale_zero, ws, ss, ready, steps, tiles, blocks, NUM_BYTES, BN, UNROLL,
                       PER_GROUP),
        _copy_tokens, (low, x, xs, ready, steps, blocks, BM, UNROLL), empty, high - low, STAGES, True,
    )  # fmt: skip


@gluon.jit
def _product(acc, w, zero, scale, tokens, SCALED: gl.constexpr, KEEP: gl.constexpr):
    """acc [64, M], or where not KEEP nothing, plus the product of a tile's words and tokens [M, 128].

    By halves, so that the second's codes are unpacked while the first is multiplied.
    """
    LAYOUT: gl.constexpr = acc.type.layout
    w, last = halves(w)
    zero, last_zero = halves(zero)
    scale, last_scale = halves(scale)
    a = floats(w, zero, scale, SCALED, tokens.dtype, LAYOUT)
    acc = warpgroup_mma(a, tokens.slice(0, 64, dim=1).permute((1, 0)), acc, use_acc=KEEP, is_async=True)
    b = floats(last, last_zero, last_scale, SCALED, tokens.dtype, LAYOUT)
    acc = warpgroup_mma(b, tokens.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
    acc, a, b = warpgroup_mma_wait(num_outstanding=0, deps=(acc, a, b))
    return acc


@gluon.jit
def _product_in_quarters(acc, w, zero, scale, tokens):
    """As `_product`, one quarter after the other, which takes fewer registers."""
    LAYOUT: gl.constexpr = acc.type.layout
    for i in gl.static_range(4):
        a = floats(quarter(w, i), quarter(zero, i), quarter(scale, i), True, tokens.dtype, LAYOUT)
        acc = warpgroup_mma(a, tokens.slice(32 * i, 32, dim=1).permute((1, 0)), acc, is_async=True)
        acc, a = warpgroup_mma_wait(num_outstanding=0, deps=(acc, a))
    return acc


@gluon.jit
def store_tile(y, out, token, row, M, N):
    """y [64, tokens] to out [token :, row :], [M, N], 16 bytes a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    store_sums(gl.convert_layout(y, LAYOUT), out, token, row, M, N)


@gluon.jit
def store_sums(y, out, token, row, M, N):
    """y [64, tokens] to out [token :, row :], [M, N], from where it is."""
    if y.shape[1] == 64:  # addresses of all would not fit the registers of two programs a multiprocessor
        first, last = y.reshape((64, 2, 32)).permute((0, 2, 1)).split()
        store_sums(first, out, token, row, M, N)
        store_sums(last, out, token + 32, row, M, N)
        return
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, y.type.layout))
    tokens = token + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    where = out + tokens.to(gl.int64)[None, :] * N + rows[:, None]
    gl.store(where, y, mask=(tokens < M)[None, :] & (rows < N)[:, None])


@gluon.jit
def _multiply(PART: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
              UNROLL: gl.constexpr, MODE: gl.constexpr, EARLY: gl.constexpr, PARTS: gl.constexpr, xs, ws, ss,
              ready, empty, out, parts, M, N, tiles, blocks, whole, pieces):  # fmt: skip
    """A multiplying group: rows PART * 64.. of every tile of its program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    steps = gl.cdiv(tiles, UNROLL)
    low, high = _share(gl.cdiv(N, BN) * blocks, steps, whole, pieces)
    tell_next(EARLY == 1)
    first_tile = low // steps
    count = 0
    for tile in range(first_tile, (high - 1) // steps + 1):
        row = tile // blocks * BN + PART * 64
        acc = gl.zeros((64, BM), gl.float32, LAYOUT)
        for _ in range(gl.maximum(low - tile * steps, 0), gl.minimum(high - tile * steps, steps)):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            for i in gl.static_range(UNROLL):
                both = scales_of(ss.index(stage * UNROLL + i), BN, PART)
                w = words_of(ws.index(stage * (BN // 64) + PART).slice(i * 4, 4))
                zero, scale = pairs(both, WORDS)
                tokens = xs.index(stage * UNROLL + i)
                if MODE == 1:
                    y = _product(acc, w, zero, scale, tokens, False, False)
                    acc += y * scale_of(both, tokens.dtype, LAYOUT)
                elif BM == 128 and BN == 256:
                    acc = _product_in_quarters(acc, w, zero, scale, tokens)
                else:
                    acc = _product(acc, w, zero, scale, tokens, True, True)
            group_barrier()  # all four warps have read their words
            mbarrier.arrive(empty.index(stage))
            count += 1
        if high <= (tile + 1) * steps:
            tell_next(EARLY == 2)
        if PARTS > 0:
            sums = parts + (gl.program_id(0) % PARTS).to(gl.int64) * M * N
            store_sums(acc, sums, tile % blocks * BM, row, M, N)
        elif gl.program_id(0) < whole:
            store_tile(acc.to(xs.dtype), out, tile % blocks * BM, row, M, N)
        else:
            part = parts + (2 * (gl.program_id(0) - whole) + tile - first_tile) * (BM * BN)
            store_sums(acc, part, 0, PART * 64, BM, BN)


@gluon.jit(do_not_specialize=["M", "tiles", "blocks", "whole", "pieces"])
def by_warps(x, words, scale_zero, out, parts, M, N, tiles, blocks, whole, pieces, BM: gl.constexpr,
             BN: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, GROUP: gl.constexpr,
             MODE: gl.constexpr, EARLY: gl.constexpr, PARTS: gl.constexpr,
             REGISTERS: gl.constexpr):  # fmt: skip
    """As `product` in w4a16_product_triton.py; BN is 128 or 256. REGISTERS: of a thread that multiplies.

    Descriptors: x [M, K] in blocks of [BM, 128]; flat, of words [4 UNROLL, 256] and of scale_zero [1, BN].
    """
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * UNROLL, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * (BN // 64), 4 * UNROLL, 256], words.layout)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES * UNROLL, 1, BN], scale_zero.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=BN // 64)
    fence_async_shared()
    given = (xs, ws, ss, ready, empty, out, parts, M, N, tiles, blocks, whole, pieces)
    copied = (x, words, scale_zero, xs, ws, ss, ready, empty, N, tiles, blocks, whole, pieces)
    if BN == 128:
        gl.warp_specialize(
            [
                (_multiply, (gl.constexpr(0), BM, BN, STAGES, UNROLL, MODE, EARLY, PARTS) + given),
                (_multiply, (gl.constexpr(1), BM, BN, STAGES, UNROLL, MODE, EARLY, PARTS) + given),
                (_copy, (BM, BN, STAGES, UNROLL, GROUP) + copied),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (gl.constexpr(0), BM, BN, STAGES, UNROLL, MODE, EARLY, PARTS) + given),
                (_multiply, (gl.constexpr(1), BM, BN, STAGES, UNROLL, MODE, EARLY, PARTS) + given),
                (_multiply, (gl.constexpr(2), BM, BN, STAGES, UNROLL, MODE, EARLY, PARTS) + given),
                (_multiply, (gl.constexpr(3), BM, BN, STAGES, UNROLL, MODE, EARLY, PARTS) + given),
                (_copy, (BM, BN, STAGES, UNROLL, GROUP) + copied),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
