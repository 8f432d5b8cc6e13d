# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of float8 codes with a scale for every 128x128 block, for many tokens (see w8a8_warps_triton.py).

Each step's sums must be scaled and added in float32 by the ordinary arithmetic units; meanwhile the tensor
cores work for the other group.
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

from qinfer.kernels.w8a8_warps_triton import copy_tiles, tile_at
from qinfer.kernels.warps_triton import copy_out, tell_next, wait_for_previous


@gluon.jit
def _scales(x_scale, w_scale, rows, M, group, stride_t, stride_g):
    return gl.load(x_scale + rows * stride_t + group * stride_g, mask=rows < M, other=0.0) * gl.load(
        w_scale + group
    )


@gluon.jit
def _multiply(HALF: gl.constexpr, xs, ws, ready, empty, buffer, x_scale, w_scale, bias, out, M, N, K,
              stride_t, stride_g, STAGES: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
              EARLY: gl.constexpr):  # fmt: skip
    """A multiplying group: rows HALF * 64.. of every tile of its program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    num_m = gl.cdiv(M, 128)
    num_n = gl.cdiv(N, 128)
    groups = gl.cdiv(K, 128)
    count = 0
    tell_next(EARLY)
    wait_for_previous(EARLY)
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        pm, pn = tile_at(tile, num_m, num_n, GROUP)
        row = pm * 128 + HALF * 64
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        block = w_scale + pn * groups
        none = gl.zeros((64, 128), gl.float32, LAYOUT)
        acc = none
        scales = _scales(x_scale, block, rows, M, 0, stride_t, stride_g)
        for group in range(groups):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            a = xs.index(stage).slice(HALF * 64, 64)
            b = ws.index(stage).permute((1, 0))
            part = warpgroup_mma(a, b, none, use_acc=False, is_async=True)
            coming = _scales(x_scale, block, rows, M, gl.minimum(group + 1, groups - 1), stride_t, stride_g)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            mbarrier.arrive(empty.index(stage))
            acc += part * scales[:, None]
            scales = coming
            count += 1
        if BIAS:
            cols = pn * 128 + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
            acc += gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(pendings=0)
        buffer.store(acc.to(out.dtype))
        fence_async_shared()
        copy_out(out, [row, pn * 128], buffer)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M"])
def blocks_by_warps(x, w, x_scale, w_scale, bias, out, M, N, K, stride_t, stride_g, STAGES: gl.constexpr,
                    GROUP: gl.constexpr, BIAS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """As `by_warps` with tiles of 128x128; x_scale [M, K / 128] by its strides, w_scale row-major."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, 128, 128], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, 128, 128], w.layout)
    first = gl.allocate_shared_memory(out.dtype, [64, 128], out.layout)
    second = gl.allocate_shared_memory(out.dtype, [64, 128], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    one: gl.constexpr = 1
    width: gl.constexpr = 128
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), xs, ws, ready, empty, first, x_scale, w_scale, bias, out, M, N, K,
                         stride_t, stride_g, STAGES, GROUP, BIAS, EARLY)),
            (_multiply, (gl.constexpr(1), xs, ws, ready, empty, second, x_scale, w_scale, bias, out, M, N, K,
                         stride_t, stride_g, STAGES, GROUP, BIAS, EARLY)),
            (copy_tiles, (x, w, xs, ws, ready, empty, M, N, K, width, width, STAGES, GROUP, one, EARLY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
