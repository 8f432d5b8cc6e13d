# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the products share in which four groups of warps have a quarter of the inputs each (Gluon).

4096 rows of weight are 64 tiles of 64 rows, and an H200 has 132 multiprocessors. Cut along the inputs into
programs, sums must go through memory, and a second kernel adds them, which takes as long as the product where
that is short. Here all inputs of a tile stay in one program: of four neighbouring steps each group of four
warps multiplies one, and in the end three groups leave their sums in shared memory for the first. Fewer
multiprocessors have work, but a few are enough to keep the memory busy.

With 8-bit weights there are halves too, for 64 tokens, whose buffers leave room for three stages then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from qinfer.kernels.offline import Variant
from qinfer.kernels.tiles import Tile
from qinfer.kernels.w4a16_warps_triton import store_tile
from qinfer.kernels.warps_triton import copy_in, descriptor_type, group_barrier

GROUPS = gl.constexpr(4)
OPTIONS = {"num_warps": 4, "launch_pdl": True}


@gluon.jit
def barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Of each buffer, whether it is ready and whether it is empty; and whether all sums are there."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    mbarrier.init(done.index(0), count=GROUPS - 1)
    fence_async_shared()
    return ready, empty, done


@gluon.jit
def copy_tokens(step, stage, x, xs, ready, token):
    """The tokens of a step of 128 inputs for each group; what lies beyond the last input is zero."""
    GROUPS: gl.constexpr = xs.shape[0] // ready.shape[0]
    for i in gl.static_range(GROUPS):
        copy_in(x, [token, (step * GROUPS + i) * 128], ready.index(stage), xs.index(stage * GROUPS + i))


@gluon.jit
def meet(PART: gl.constexpr, acc, sums, done, out, token, row, M, N):
    """The sum of the groups' acc [64, tokens], in their order, to out [token :, row :], [M, N].

    sums: room for all of them but the first's.
    """
    OTHERS: gl.constexpr = sums.shape[0]
    if PART > 0:
        sums.index(PART - 1).store(acc)
        group_barrier()  # all four warps have left theirs
        mbarrier.arrive(done.index(0))
    else:
        mbarrier.wait(done.index(0), 0)
        for i in gl.static_range(OTHERS):
            acc += sums.index(i).load(acc.type.layout)
        store_tile(acc.to(out.dtype.element_ty), out, token, row, M, N)


def tiles_of(m: int, n: int, bm: int) -> tuple[int, int]:
    """Tiles of [64, bm] for N rows and M tokens, and how many of them lie along the tokens."""
    blocks = triton.cdiv(m, bm)
    return triton.cdiv(n, 64) * blocks, blocks


def variant_of(
    op: str, kernel: Any, entry: Tile, element: str, types: Mapping[str, str], constants: Mapping[str, Any]
) -> Variant:
    """A kernel by quarters as it compiles for activations of "bf16" or "fp16".

    types: of its arguments that are no int, beside x and out.
    """
    types = {"x": descriptor_type(element, [entry["BM"], 128]), "out": f"*{element}", **types}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    label = " ".join([op, element, *(f"{key}={value}" for key, value in entry.items())])
    return Variant(label, kernel, signature, constants, OPTIONS, ("N",), wants_tensor_cores=True)
