# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of many rows over paged K and V on Hopper, each warp with one task (see warps_triton.py).

The same work as `paged_prefill_triton`, block by block in the same order, for plain pages without a window or
a cap. One warp copies tiles of K and V from their pages into rings of buffers; two groups of four warps take
half of a block's rows each. A group starts the product for its next tile's logits and the one of this tile's
probabilities with V together, and computes the next probabilities as soon as it has the logits, while the
tensor cores are still busy with V. The groups meet only at the buffers' barriers, so what one computes hides
behind the other's products too.

The last tile may hold tokens that nobody owns yet, which may be NaN. Their logits are overwritten, but V
times a probability of zero would still be NaN: there each group first writes zeros over them in shared
memory; both write the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qinfer.kernels.paged_blocks_triton import block_at, num_blocks_of
from qinfer.kernels.warps_triton import copy_in

LOWEST = gl.constexpr(-1.0e30)  # finite: -inf minus -inf is NaN


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """One per buffer of a ring, for COUNT arrivals."""
    ring = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.index(i), count=COUNT)
    return ring


@gluon.jit
def copy_pages(k, v, ks, vs, k_ready, k_empty, v_ready, v_empty, table, seq_lens, query_starts, header,
               prefill, table_stride, num_seqs, num_kv_heads, most_pages, GROUP: gl.constexpr,
               PAGE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: fills the next buffers as soon as they are empty."""
    ROWS: gl.constexpr = 128 // GROUP
    TILE: gl.constexpr = k.block_shape[0]
    NUM_BYTES: gl.constexpr = TILE * k.block_shape[1] * (k.dtype.primitive_bitwidth // 8)
    num_prefill, num_blocks = num_blocks_of(header, most_pages, ROWS)
    count = 0
    for turn in range(0, gl.cdiv(num_blocks * num_kv_heads, gl.num_programs(0))):
        kv_head, seq, _, _, _, _, tiles = block_at(turn, num_prefill, num_blocks, num_seqs, num_kv_heads,
            prefill, query_starts, seq_lens, ROWS, TILE)  # fmt: skip
        pages = table + seq.to(gl.int64) * table_stride
        for tile in range(0, tiles):
            page = gl.load(pages + tile * TILE // PAGE).to(gl.int32)  # before it waits
            at = (page * num_kv_heads + kv_head) * PAGE + tile * TILE % PAGE
            stage = count % STAGES
            phase = (count // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), NUM_BYTES)
            copy_in(k, [at, 0], k_ready.index(stage), ks.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), NUM_BYTES)
            copy_in(v, [at, 0], v_ready.index(stage), vs.index(stage))
            count += 1


@gluon.jit
def _next_tile(count, tile, top, total, result, p, q_rows, position, ks, vs, k_ready, k_empty, v_ready,
               v_empty, qk_scale, TILE: gl.constexpr, STAGES: gl.constexpr,
               MASKED: gl.constexpr):  # fmt: skip
    """Logits of a tile, with the V of the one before it, whose probabilities are `p`; `count`: its K's."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    stage = count % STAGES
    mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
    logits = gl.zeros((64, TILE), gl.float32, LAYOUT)
    logits = warpgroup_mma(q_rows, ks.index(stage).permute((1, 0)), logits, use_acc=False, is_async=True)
    before = (count - 1) % STAGES
    result = warpgroup_mma(p, vs.index(before), result, is_async=True)
    logits = warpgroup_mma_wait(num_outstanding=1, deps=(logits,))
    mbarrier.arrive(k_empty.index(stage))
    if MASKED:
        token = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
        logits = gl.where(token[None, :] <= position[:, None], logits * qk_scale, LOWEST)
        new_top = gl.maximum(top, gl.max(logits, 1))
        new_p = gl.exp2(logits - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.max(logits, 1) * qk_scale)
        new_p = gl.exp2(logits * qk_scale - new_top[:, None])
    fade = gl.exp2(top - new_top)
    total = total * fade + gl.sum(new_p, 1)
    new_p = gl.convert_layout(new_p.to(p.dtype), p.type.layout)
    # this tile's V is needed next; waiting for it here keeps the machine's compiler from moving what was just
    # computed behind the wait for the products
    mbarrier.wait(v_ready.index(stage), count // STAGES & 1)
    result, p, new_p = warpgroup_mma_wait(num_outstanding=0, deps=(result, p, new_p))
    mbarrier.arrive(v_empty.index(before))
    result = result * gl.convert_layout(fade, gl.SliceLayout(1, result.type.layout))[:, None]
    return new_top, total, result, new_p


@gluon.jit
def _zero_from(buffer, first, LAYOUT: gl.constexpr):
    """Zeros in the rows `first`.. of a buffer."""
    for i in gl.static_range(buffer.shape[0] // 16):
        some = buffer.slice(i * 16, 16)
        values = some.load(LAYOUT)
        real = i * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)) < first
        some.store(gl.where(real[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def attend(HALF: gl.constexpr, q, out, q_tile, ks, vs, k_ready, k_empty, v_ready, v_empty, seq_lens,
           query_starts, header, prefill, q_stride, num_seqs, num_kv_heads, most_pages, qk_scale, v_scale,
           GROUP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A multiplying group: rows HALF * 64.. of every block of its program."""
    ROWS: gl.constexpr = 128 // GROUP
    TILE: gl.constexpr = ks.shape[1]
    DIM: gl.constexpr = ks.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    ACROSS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    num_prefill, num_blocks = num_blocks_of(header, most_pages, ROWS)
    count = 0
    for turn in range(0, gl.cdiv(num_blocks * num_kv_heads, gl.num_programs(0))):
        kv_head, _, start, rows, length, first_row, tiles = block_at(turn, num_prefill, num_blocks, num_seqs,
            num_kv_heads, prefill, query_starts, seq_lens, ROWS, TILE)  # fmt: skip
        if tiles > 0:
            line = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACROSS))
            column = gl.arange(0, DIM, gl.SliceLayout(0, ACROSS))
            row = first_row + line // GROUP
            head = kv_head * GROUP + line % GROUP
            real = (row < rows) & (line < ROWS * GROUP)
            q_at = q + ((start + row).to(gl.int64) * q_stride + head * DIM)[:, None] + column[None, :]
            q_tile.store(gl.load(q_at, mask=real[:, None], other=0.0).to(ks.dtype))
            fence_async_shared()

            line = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            position = length - rows + first_row + line // GROUP
            stage = count % STAGES
            mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
            logits = gl.zeros((64, TILE), gl.float32, LAYOUT)
            k_tile = ks.index(stage).permute((1, 0))
            logits = warpgroup_mma(q_tile, k_tile, logits, use_acc=False, is_async=True)
            logits = warpgroup_mma_wait(num_outstanding=0, deps=(logits,))
            mbarrier.arrive(k_empty.index(stage))
            token = gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
            logits = gl.where(token[None, :] <= position[:, None], logits * qk_scale, LOWEST)
            top = gl.max(logits, 1)
            p = gl.exp2(logits - top[:, None])
            total = gl.sum(p, 1)
            p = gl.convert_layout(p.to(ks.dtype), P_LAYOUT)
            mbarrier.wait(v_ready.index(stage), count // STAGES & 1)
            result = gl.zeros((64, DIM), gl.float32, WIDE)
            full_to = gl.maximum((length - rows + first_row + 1) // TILE, 1)
            for tile in range(1, gl.minimum(full_to, tiles)):
                top, total, result, p = _next_tile(
                    count + tile, tile, top, total, result, p, q_tile, position, ks, vs, k_ready, k_empty,
                    v_ready, v_empty, qk_scale, TILE, STAGES, False)  # fmt: skip
            for tile in range(full_to, tiles):
                top, total, result, p = _next_tile(
                    count + tile, tile, top, total, result, p, q_tile, position, ks, vs, k_ready, k_empty,
                    v_ready, v_empty, qk_scale, TILE, STAGES, True)  # fmt: skip

            count += tiles
            stage = (count - 1) % STAGES
            if tiles * TILE > length:
                _zero_from(vs.index(stage), length - (tiles - 1) * TILE, ACROSS)
            result = warpgroup_mma(p, vs.index(stage), result, is_async=True)
            result, p = warpgroup_mma_wait(num_outstanding=0, deps=(result, p))
            mbarrier.arrive(v_empty.index(stage))

            share = gl.convert_layout(v_scale / total, gl.SliceLayout(1, WIDE))
            line = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
            column = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
            row = first_row + line // GROUP
            head = kv_head * GROUP + line % GROUP
            real = (row < rows) & (line < ROWS * GROUP)
            out_row = (start + row).to(gl.int64) * (num_kv_heads * GROUP) + head
            out_at = out + (out_row * DIM)[:, None] + column[None, :]
            gl.store(out_at, (result * share[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=["table_stride", "num_kv_heads", "num_seqs", "most_pages"])
def prefill_by_warps(q, k, v, table, seq_lens, query_starts, header, prefill, out, q_stride, table_stride,
                     num_seqs, num_kv_heads, qk_scale, v_scale, most_pages, GROUP: gl.constexpr,
                     PAGE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """k, v: descriptors of all pages as [tokens, DIM], in blocks of a tile, which must divide a page.

    Does nothing where the step's chunks have more than `most_pages` pages.
    """
    TILE: gl.constexpr = k.block_shape[0]
    DIM: gl.constexpr = k.block_shape[1]
    ks = gl.allocate_shared_memory(k.dtype, [STAGES, TILE, DIM], k.layout)
    vs = gl.allocate_shared_memory(v.dtype, [STAGES, TILE, DIM], v.layout)
    first = gl.allocate_shared_memory(k.dtype, [64, DIM], k.layout)
    second = gl.allocate_shared_memory(k.dtype, [64, DIM], k.layout)
    k_ready = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_ready = barriers(STAGES, 1)
    v_empty = barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), q, out, first, ks, vs, k_ready, k_empty, v_ready, v_empty, seq_lens,
                      query_starts, header, prefill, q_stride, num_seqs, num_kv_heads, most_pages, qk_scale,
                      v_scale, GROUP, STAGES)),
            (attend, (gl.constexpr(1), q, out, second, ks, vs, k_ready, k_empty, v_ready, v_empty, seq_lens,
                      query_starts, header, prefill, q_stride, num_seqs, num_kv_heads, most_pages, qk_scale,
                      v_scale, GROUP, STAGES)),
            (copy_pages, (k, v, ks, vs, k_ready, k_empty, v_ready, v_empty, table, seq_lens, query_starts,
                          header, prefill, table_stride, num_seqs, num_kv_heads, most_pages, GROUP, PAGE,
                          STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
