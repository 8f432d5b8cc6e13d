# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The kernel of products with 4-bit weights on Hopper with one task per warp (see warps_triton.py).

Where 64 or more tokens meet a weight, copies of the tokens from the L2 cache to the multiprocessors take
long: every tile of output fetches them again. So tiles are 256 rows high, one a multiprocessor. One warp
copies ahead into a ring of buffers in shared memory, and begins with the weight before the kernel in front
has ended; each group of four warps turns the codes of 64 rows into floats in registers and multiplies them.
While one does the former the tensor cores work for another, so nobody need take both at once.

Few tokens gain nothing by it: there, more and smaller programs a multiprocessor wait less for the memory
(H200, 28672x4096: 33.0 us against 34.0 for 64 tokens, but 28.2 against 22.3 for 16).

Scales go into the weight, rounded to 16 bits (MODE 0 of w4a16_product_triton.py), and pieces are cut alike.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.warps_triton import copy_in, group_barrier, tell_next, wait_for_previous

# A mask puts two codes of a word into the low bits of a power of two; then come the zero and, perhaps, scale.
_CODES = """{ .reg .b32 a,b,c,d,s1,s2,s3;
    shr.u32 s1,$8,4; shr.u32 s2,$8,8; shr.u32 s3,$8,12;
    lop3.b32 a,$8,0x000f000f,MAGIC,0xea; lop3.b32 b,s1,0x000f000f,MAGIC,0xea;
    lop3.b32 c,s2,0x000f000f,MAGIC,0xea; lop3.b32 d,s3,0x000f000f,MAGIC,0xea;
    sub.rn.TYPE a,a,$9; sub.rn.TYPE b,b,$9; sub.rn.TYPE c,c,$9; sub.rn.TYPE d,d,$9;
    mul.rn.TYPE a,a,$10; mul.rn.TYPE b,b,$10; mul.rn.TYPE c,c,$10; mul.rn.TYPE d,d,$10;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},b; mov.b32 {$4,$5},c; mov.b32 {$6,$7},d; }"""
_UNSCALED = "\n".join(line for line in _CODES.splitlines() if "mul.rn" not in line)
BFLOAT16 = gl.constexpr(_CODES.replace("MAGIC", "0x43004300").replace("TYPE", "bf16x2"))
FLOAT16 = gl.constexpr(_CODES.replace("MAGIC", "0x64006400").replace("TYPE", "f16x2"))
BFLOAT16_UNSCALED = gl.constexpr(_UNSCALED.replace("MAGIC", "0x43004300").replace("TYPE", "bf16x2"))
FLOAT16_UNSCALED = gl.constexpr(_UNSCALED.replace("MAGIC", "0x64006400").replace("TYPE", "f16x2"))


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
def _copy_words(words, ws, ready, unit, steps, blocks, stage, NUM_BYTES: gl.constexpr, BN: gl.constexpr):
    mbarrier.expect(ready.index(stage), NUM_BYTES)
    first = unit // steps // blocks * (BN // 64)
    for i in gl.static_range(BN // 64):
        at = ((first + i) * steps + unit % steps) * 64
        copy_in(words, [at, 0], ready.index(stage), ws.index(stage * (BN // 64) + i))


@gluon.jit
def _copy_tokens(x, xs, ready, unit, steps, blocks, stage, BM: gl.constexpr):
    at = [unit // steps % blocks * BM, unit % steps * 128]
    copy_in(x, at, ready.index(stage), xs.index(stage))


@gluon.jit
def _copy(x, words, xs, ws, ready, empty, N, steps, blocks, whole, pieces, BM: gl.constexpr, BN: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: fills the next buffers as soon as all groups have emptied them."""
    NUM_BYTES: gl.constexpr = BN * 64 + BM * 256
    low, high = _share(gl.cdiv(N, BN) * blocks, steps, whole, pieces)
    soon = gl.minimum(high - low, STAGES)
    for i in range(soon):
        _copy_words(words, ws, ready, low + i, steps, blocks, i, NUM_BYTES, BN)
    wait_for_previous(True)
    for i in range(soon):
        _copy_tokens(x, xs, ready, low + i, steps, blocks, i, BM)
    for i in range(soon, high - low):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        _copy_words(words, ws, ready, low + i, steps, blocks, stage, NUM_BYTES, BN)
        _copy_tokens(x, xs, ready, low + i, steps, blocks, stage, BM)


@gluon.jit
def pairs(both, LIKE: gl.constexpr):
    """`scale_zero` words [64] -> zero and scale, each twice in an int32, of every word of [64, 16]."""
    zero = both & -65536
    scale = both & 65535
    line = gl.zeros((64, 16), gl.int32, LIKE)
    zero, line = gl.broadcast((zero | ((zero >> 16) & 65535))[:, None], line)
    scale, line = gl.broadcast((scale | (scale << 16))[:, None], line)
    return zero, scale


@gluon.jit
def _halves(w):
    """Of [64, 2 n] the even columns and the odd ones, [64, n] each."""
    return w.reshape((64, w.shape[1] // 2, 2)).split()


@gluon.jit
def _quarter(w, NUMBER: gl.constexpr):
    """[64, 16] for words -> [64, 4] for those of inputs 32 NUMBER and on."""
    even, odd = _halves(w)
    some = even if NUMBER % 2 == 0 else odd
    first, last = _halves(some)
    return first if NUMBER < 2 else last


@gluon.jit
def floats(w, zero, scale, SCALED: gl.constexpr, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, W] and `pairs` of them -> codes minus zeros, [64, 8 W] as the cores want it.

    SCALED: times the scale.
    """
    if SCALE == gl.bfloat16:  # noqa: SIM300
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            BFLOAT16 if SCALED else BFLOAT16_UNSCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [w, zero, scale],
            is_pure=True, pack=1,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                   gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        )  # fmt: skip
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            FLOAT16 if SCALED else FLOAT16_UNSCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [w, zero, scale],
            is_pure=True, pack=1,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16,
                   gl.float16, gl.float16, gl.float16, gl.float16),
        )  # fmt: skip
    low = gl.join(gl.join(o0, o2), gl.join(o4, o6))
    high = gl.join(gl.join(o1, o3), gl.join(o5, o7))
    tile = gl.join(low, high).reshape((64, 4, w.shape[1] // 4, 2, 2, 2))  # row, t, block, h, s, p
    tile = tile.permute((0, 2, 4, 3, 1, 5)).reshape((64, w.shape[1] * 8))
    return gl.convert_layout(tile, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _add(acc, w, zero, scale, tokens):
    """acc [64, M] plus the product of words and tokens [M, inputs]."""
    LAYOUT: gl.constexpr = acc.type.layout
    a = floats(w, zero, scale, True, tokens.dtype, LAYOUT)
    acc = warpgroup_mma(a, tokens.permute((1, 0)), acc, is_async=True)
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
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, y.type.layout))
    tokens = token + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    where = out + tokens.to(gl.int64)[None, :] * N + rows[:, None]
    gl.store(where, y, mask=(tokens < M)[None, :] & (rows < N)[:, None])


@gluon.jit
def _multiply(PART: gl.constexpr, xs, ws, ready, empty, scale_zero, out, parts, M, N, scale_stride, steps,
              blocks, whole, pieces, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
              GROUP: gl.constexpr, EARLY: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """A multiplying group: rows PART * 64.. of every tile of its program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    low, high = _share(gl.cdiv(N, BN) * blocks, steps, whole, pieces)
    tell_next(EARLY == 1)
    first_tile = low // steps
    count = 0
    for tile in range(first_tile, (high - 1) // steps + 1):
        lo = gl.maximum(low - tile * steps, 0)
        hi = gl.minimum(high - tile * steps, steps)
        row = tile // blocks * BN + PART * 64
        line = row + gl.arange(0, 64, gl.SliceLayout(1, WORDS))
        coming = gl.load(scale_zero + lo // (GROUP // 128) * scale_stride + line, mask=line < N, other=0)
        acc = gl.zeros((64, BM), gl.float32, LAYOUT)
        for step in range(lo, hi):
            stage = count % STAGES
            both = coming
            group = gl.minimum(step + 1, steps - 1) // (GROUP // 128)
            coming = gl.load(scale_zero + group * scale_stride + line, mask=line < N, other=0)
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            w = ws.index(stage * (BN // 64) + PART).load(WORDS)
            zero, scale = pairs(both, WORDS)
            if BM < 128:
                acc = _add(acc, w, zero, scale, xs.index(stage))
            else:  # by quarters, which need fewer registers
                for i in gl.static_range(4):
                    acc = _add(acc, _quarter(w, i), _quarter(zero, i), _quarter(scale, i),
                               xs.index(stage).slice(32 * i, 32, dim=1))  # fmt: skip
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


@gluon.jit(do_not_specialize=["M", "steps", "blocks", "whole", "pieces"])
def by_warps(x, words, scale_zero, out, parts, M, N, scale_stride, steps, blocks, whole, pieces,
             BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
             EARLY: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
    """As `product` in w4a16_product_triton.py; BN is 256.

    x [M, K] in blocks of [BM, 128] and the words as int32 [rows, 16] in blocks of [64, 16]: descriptors.
    """
    gl.static_assert(BN == 256)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * (BN // 64), 64, 16], words.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=BN // 64)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), xs, ws, ready, empty, scale_zero, out, parts, M, N, scale_stride,
                         steps, blocks, whole, pieces, BM, BN, STAGES, GROUP, EARLY, PARTS)),
            (_multiply, (gl.constexpr(1), xs, ws, ready, empty, scale_zero, out, parts, M, N, scale_stride,
                         steps, blocks, whole, pieces, BM, BN, STAGES, GROUP, EARLY, PARTS)),
            (_multiply, (gl.constexpr(2), xs, ws, ready, empty, scale_zero, out, parts, M, N, scale_stride,
                         steps, blocks, whole, pieces, BM, BN, STAGES, GROUP, EARLY, PARTS)),
            (_multiply, (gl.constexpr(3), xs, ws, ready, empty, scale_zero, out, parts, M, N, scale_stride,
                         steps, blocks, whole, pieces, BM, BN, STAGES, GROUP, EARLY, PARTS)),
            (_copy, (x, words, xs, ws, ready, empty, N, steps, blocks, whole, pieces, BM, BN, STAGES)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )  # fmt: skip
