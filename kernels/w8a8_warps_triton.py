# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of 8-bit codes for many tokens on Hopper, each warp with one task (see warps_triton.py).

One warp copies tiles of both operands into a ring of buffers in shared memory; two groups of four warps
multiply, each its own half of the tile's rows, and scale and store what they have. They meet only at the
buffers' barriers, so while one group scales or stores, the other has the tensor cores for itself: int8 went
from 1.75 to 2.1 times torch.mm in bfloat16 (H200, 1024 and 4096 tokens).

A group can be ahead of the other by no more steps than there are buffers, so there must be many of these.
Results leave through a buffer that both groups share, in turns, which keeps them out of step.

Of a weight whose rows are gates and ups in turns of PIECE (GATE), act(gate) * up leaves, half as much: what a
group computes for that is hidden like its scales, and the next kernel reads half as much.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.activation_triton import GELU_SLOPE, LOG2E, LOGISTIC
from qinfer.kernels.warps_triton import copy_in, copy_out, tell_next, wait_for_previous

PIECE = gl.constexpr(64)  # columns of results that go to memory at once


@gluon.jit
def tile_at(tile, num_m, num_n, GROUP: gl.constexpr):
    """(tile row, tile column): GROUP rows of tiles at a time, so that tiles in flight share operands."""
    per_group = GROUP * num_n
    begin = tile // per_group * GROUP
    height = gl.minimum(num_m - begin, GROUP)
    return begin + tile % per_group % height, tile % per_group // height


@gluon.jit
def ring(x, w, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Buffers for STAGES steps of both operands, and the barriers that tell when each is ready and empty."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 128], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, BN, 128], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return xs, ws, ready, empty


@gluon.jit
def copy_tiles(x, w, xs, ws, ready, empty, M, N, K, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
               GROUP: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """The copying warp: fills the next buffer as soon as both groups have emptied it.

    With EARLY, what the buffers hold of the weight comes while the kernel in front still works on x.
    """
    num_m = gl.cdiv(M, BM)
    num_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 128)
    count = 0
    soon = 0
    if EARLY:
        pm, pn = tile_at(gl.program_id(0) % (num_m * num_n), num_m, num_n, GROUP)
        split = gl.program_id(0) // (num_m * num_n)
        begin = split * steps // SPLITS
        soon = gl.minimum((split + 1) * steps // SPLITS - begin, STAGES)
        for i in range(soon):
            mbarrier.expect(ready.index(i), (BM + BN) * 128)
            copy_in(w, [(begin + i) * N + pn * BN, 0], ready.index(i), ws.index(i))
    wait_for_previous(EARLY)
    for unit in range(gl.program_id(0), num_m * num_n * SPLITS, gl.num_programs(0)):
        pm, pn = tile_at(unit % (num_m * num_n), num_m, num_n, GROUP)
        split = unit // (num_m * num_n)
        for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            late = count >= soon
            mbarrier.expect(ready.index(stage), (BM + BN) * 128, pred=late)
            copy_in(x, [pm * BM, step * 128], ready.index(stage), xs.index(stage))
            copy_in(w, [step * N + pn * BN, 0], ready.index(stage), ws.index(stage), pred=late)
            count += 1


@gluon.jit
def _gated(gate, up, GATE: gl.constexpr):
    """act(gate) * up, as in activation_triton.py."""
    slope = gate * (1.0 + 0.044715 * gate * gate) * GELU_SLOPE if GATE == "gelu" else gate
    sigmoid = gl.inline_asm_elementwise(
        LOGISTIC, "=f,f", [slope * -LOG2E], dtype=gl.float32, is_pure=True, pack=1
    )
    return gate * sigmoid * up


@gluon.jit
def write(y, buffers, out, row, col, GATE: gl.constexpr = None):
    """Sends y, a group's rows, to `out` at (row, col), by pieces as wide as a buffer.

    buffers: [number, rows, columns of a piece] in shared memory; where y has more pieces, one is filled while
    the others are being read. The caller waits in the end. With GATE, y is gates and ups in turns of a piece,
    and col that of the first product.
    """
    WIDTH: gl.constexpr = y.shape[1]
    if buffers.shape[2] < WIDTH:
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 32])
        left, right = y.reshape((y.shape[0], 2, WIDTH // 2)).permute((0, 2, 1)).split()
        left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
        right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
        if GATE is None:
            write(left, buffers, out, row, col)
            write(right, buffers, out, row, col + WIDTH // 2)
        elif buffers.shape[2] == WIDTH // 2:
            write(_gated(left, right, GATE), buffers, out, row, col)
        else:
            write(left, buffers, out, row, col, GATE)
            write(right, buffers, out, row, col + WIDTH // 4, GATE)
    else:
        buffer = buffers.index(col // WIDTH % buffers.shape[0])
        tma.store_wait(pendings=buffers.shape[0] - 1)
        buffer.store(y.to(out.dtype))
        fence_async_shared()
        copy_out(out, [row, col], buffer)


@gluon.jit
def _multiply(HALF: gl.constexpr, xs, ws, ready, empty, buffers, turns, x_scale, w_scale, bias, out, M, N,
              K, stride_t, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
              SPLITS: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr, GATE: gl.constexpr):  # fmt: skip
    """A multiplying group: rows HALF * BM / 2.. of every tile of its program.

    turns[HALF] is told when the other group's results have left `buffers`; group 0 goes first. Waiting for
    one's own results to leave costs nothing while the tensor cores have the next tile's first step.
    """
    INT: gl.constexpr = xs.dtype == gl.int8
    ROWS: gl.constexpr = BM // 2
    # Triton knows no int8 instruction of 256 columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 if INT else BN, 32])
    num_m = gl.cdiv(M, BM)
    num_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 128)
    count = 0
    tiles = 0
    tell_next(EARLY)
    wait_for_previous(EARLY)
    acc = gl.zeros((ROWS, BN), gl.int32 if INT else gl.float32, LAYOUT)
    for unit in range(gl.program_id(0), num_m * num_n * SPLITS, gl.num_programs(0)):
        pm, pn = tile_at(unit % (num_m * num_n), num_m, num_n, GROUP)
        split = unit // (num_m * num_n)
        begin = split * steps // SPLITS
        end = (split + 1) * steps // SPLITS
        if SPLITS > 1:  # a share may have no steps
            acc = gl.zeros((ROWS, BN), gl.int32 if INT else gl.float32, LAYOUT)
        for step in range(begin, end):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            a = xs.index(stage).slice(HALF * ROWS, ROWS)
            b = ws.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=step > begin, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))  # the cores always have a next step
            if SPLITS == 1:
                tma.store_wait(pendings=0)
                mbarrier.arrive(turns.index(1 - HALF), pred=(step == begin) & (tiles > 0))
            mbarrier.arrive(empty.index((count - 1) % STAGES), pred=step > begin)
            count += 1
        if SPLITS == 1:
            mbarrier.wait(turns.index(HALF), tiles & 1 ^ (1 - HALF))
        row = pm * BM + HALF * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        cols = pn * BN + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        # on their way while the last step is multiplied
        fx = gl.load(x_scale + rows * stride_t, mask=rows < M, other=0.0)
        fw = gl.load(w_scale + cols, mask=cols < N, other=0.0)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((count - 1) % STAGES), pred=end > begin)
        y = acc.to(gl.float32) * fw[None, :] * fx[:, None]
        if SPLITS > 1:
            where = out + (split.to(gl.int64) * M + rows[:, None]) * N + cols[None, :]
            gl.store(where, y, mask=(rows < M)[:, None] & (cols < N)[None, :])
        else:
            if BIAS:
                y += gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
            write(y, buffers, out, row, pn * BN if GATE is None else pn * BN // 2, GATE)
            tiles += 1
    if SPLITS == 1:
        tma.store_wait(pendings=0)
        mbarrier.arrive(turns.index(1 - HALF))


@gluon.jit(do_not_specialize=["M"])
def by_warps(x, w, x_scale, w_scale, bias, out, M, N, K, stride_t, BM: gl.constexpr, BN: gl.constexpr,
             STAGES: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, BIAS: gl.constexpr,
             EARLY: gl.constexpr, GATE: gl.constexpr = None):  # fmt: skip
    """x [M, K] in blocks of [BM, 128], w panels of [BN, 128], out [M, N] of [BM / 2, PIECE]: descriptors.

    Any grid. SPLITS > 1: out is a pointer to float32 [SPLITS, M, N], which gets no bias. GATE ("silu" or
    "gelu"; SPLITS is 1): rows of w are gates and ups in turns of PIECE, and out is [M, N / 2].
    """
    xs, ws, ready, empty = ring(x, w, BM, BN, STAGES)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    if SPLITS == 1:
        NUM: gl.constexpr = BN // PIECE if GATE is None else BN // PIECE // 2
        buffers = gl.allocate_shared_memory(out.dtype, [NUM, BM // 2, PIECE], out.layout)
    else:  # results go straight to memory
        buffers = xs
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), xs, ws, ready, empty, buffers, turns, x_scale, w_scale, bias, out,
                         M, N, K, stride_t, BM, BN, STAGES, GROUP, SPLITS, BIAS, EARLY, GATE)),
            (_multiply, (gl.constexpr(1), xs, ws, ready, empty, buffers, turns, x_scale, w_scale, bias, out,
                         M, N, K, stride_t, BM, BN, STAGES, GROUP, SPLITS, BIAS, EARLY, GATE)),
            (copy_tiles, (x, w, xs, ws, ready, empty, M, N, K, BM, BN, STAGES, GROUP, SPLITS, EARLY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
