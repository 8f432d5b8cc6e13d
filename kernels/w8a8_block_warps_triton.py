# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of float8 codes with a scale for every 128x128 block, for many tokens (see w8a8_warps_triton.py).

Each step's sums must be scaled and added in float32 by the ordinary arithmetic units; meanwhile the tensor
cores work for the other group. A group's tile is 64 x 256 all the same, for a narrower one moves more bytes
from the L2 than that gives (0.7 of torch's product without blocks, instead of 0.85): its two halves take
turns in one set of registers for sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.w8a8_warps_triton import PIECE, copy_tiles, ring, tile_at, write
from qinfer.kernels.warps_triton import tell_next, wait_for_previous


@gluon.jit
def _added(acc, sums, scale):
    """acc + sums * scale, before anything that comes after: else the compiler copies the sums first."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [sums, scale[:, None], acc],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _half(HALF: gl.constexpr, SIDE: gl.constexpr, xs, ws, stage, sums):
    """Sets the tensor cores to one step of the left or right half of a group's tile."""
    a = xs.index(stage).slice(HALF * 64, 64)
    b = ws.index(stage).slice(SIDE * 128, 128)
    return warpgroup_mma(a, b.permute((1, 0)), sums, use_acc=False, is_async=True)


@gluon.jit
def _multiply(HALF: gl.constexpr, xs, ws, ready, empty, buffers, x_scale, w_scale, bias, out, M, N, K,
              stride_t, stride_g, STAGES: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
              EARLY: gl.constexpr):  # fmt: skip
    """A multiplying group: rows HALF * 64.. of every tile of its program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    num_m = gl.cdiv(M, 128)
    num_n = gl.cdiv(N, 256)
    groups = gl.cdiv(K, 128)
    count = 0
    tell_next(EARLY)
    wait_for_previous(EARLY)
    sums = gl.zeros((64, 128), gl.float32, LAYOUT)
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        pm, pn = tile_at(tile, num_m, num_n, GROUP)
        row = pm * 128 + HALF * 64
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        left = gl.zeros((64, 128), gl.float32, LAYOUT)
        right = gl.zeros((64, 128), gl.float32, LAYOUT)
        # the scales of a step are loaded while the one before multiplies
        x_at = x_scale + rows * stride_t
        left_at = w_scale + pn * 2 * groups
        right_at = w_scale + gl.minimum(pn * 2 + 1, gl.cdiv(N, 128) - 1) * groups
        of_x = gl.load(x_at, mask=rows < M, other=0.0)
        of_left = gl.load(left_at)
        of_right = gl.load(right_at)
        for group in range(groups):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            sums = _half(HALF, 0, xs, ws, stage, sums)
            left_scale = of_x * of_left
            right_scale = of_x * of_right
            coming = gl.minimum(group + 1, groups - 1)
            of_x = gl.load(x_at + coming * stride_g, mask=rows < M, other=0.0)
            of_left = gl.load(left_at + coming)
            of_right = gl.load(right_at + coming)
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            left = _added(left, sums, left_scale)
            sums = _half(HALF, 1, xs, ws, stage, sums)
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(empty.index(stage))
            right = _added(right, sums, right_scale)
            count += 1
        if BIAS:
            cols = pn * 256 + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
            left += gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
            right += gl.load(bias + cols + 128, mask=cols + 128 < N, other=0.0).to(gl.float32)[None, :]
        write(left, buffers, out, row, pn * 256)
        write(right, buffers, out, row, pn * 256 + 128)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M"])
def blocks_by_warps(x, w, x_scale, w_scale, bias, out, M, N, K, stride_t, stride_g, BM: gl.constexpr,
                    BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr,
                    BIAS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """As `by_warps`, tiles of 128x256, K uncut; x_scale [M, K / 128] by its strides, w_scale row-major."""
    gl.static_assert(BM == 128 and BN == 256 and SPLITS == 1)
    xs, ws, ready, empty = ring(x, w, BM, BN, STAGES)
    first = gl.allocate_shared_memory(out.dtype, [2, 64, PIECE], out.layout)
    second = gl.allocate_shared_memory(out.dtype, [2, 64, PIECE], out.layout)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), xs, ws, ready, empty, first, x_scale, w_scale, bias, out, M, N, K,
                         stride_t, stride_g, STAGES, GROUP, BIAS, EARLY)),
            (_multiply, (gl.constexpr(1), xs, ws, ready, empty, second, x_scale, w_scale, bias, out, M, N, K,
                         stride_t, stride_g, STAGES, GROUP, BIAS, EARLY)),
            (copy_tiles, (x, w, xs, ws, ready, empty, M, N, K, BM, BN, STAGES, GROUP, SPLITS, EARLY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
