# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of many rows of a sequence over paged K and V: the kernel of prefill chunks.

A block is some consecutive rows of one sequence times the query heads that share a KV head: BLOCK rows of the
tensor cores' left operand, all over the same K and V. Its tiles are of two kinds. Those that every row sees
whole run without masks; the ones on the diagonal, and where a window begins, compare positions. K and V are
read from the pages also for the tokens of this very step.

How many blocks there are is known on the device only. The grid is fixed, a few programs per multiprocessor,
and each takes every n-th block, the heaviest (latest) first and there and back again, so that sums of work
come out even. Blocks are found among the step's prefill sequences by `sequence_of`. Where a step's pages fit
into scratch pages of 16 bits, another kernel does the work and this one ends at once (`paged_widen_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from qinfer.kernels.kv_unpack_triton import INT8
from qinfer.kernels.paged_walk_triton import LOWEST, page_ids, sequence_of, slots_of, soft_cap


@triton.jit
def _tiles(
    state_top,
    state_total,
    state_sum,
    q_rows,
    position,
    k,
    v,
    k_scales,
    v_scales,
    pages,
    kv_head,
    num_kv_heads,
    first,
    last,
    seen_from,
    length,
    qk_scale,
    softcap,
    window,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    PV_TYPE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Tiles `first` to `last` of one block; without MASKED every row sees every token of them."""
    token = tl.arange(0, TILE)
    lane = tl.arange(0, LANES)
    top, total, result = state_top, state_total, state_sum
    SCALAR: tl.constexpr = PAGE % TILE == 0
    page = page_ids(pages, first * TILE, length, TILE, PAGE, SCALAR)
    for tile in tl.range(first, last):
        at = tile * TILE
        here = at + token
        slot = slots_of(page, at, kv_head, num_kv_heads, TILE, PAGE, SCALAR)
        page = page_ids(pages, at + TILE, length, TILE, PAGE, SCALAR)
        offset = slot[:, None] * DIM + lane[None, :]
        if MASKED:
            owned = (here < length) & (here >= seen_from)
            k_tile = tl.load(k + offset, mask=(lane < DIM)[None, :] & owned[:, None], other=0.0)
            v_tile = tl.load(v + offset, mask=(lane < DIM)[None, :] & owned[:, None], other=0.0)
        elif LANES == DIM:
            k_tile = tl.load(k + offset)
            v_tile = tl.load(v + offset)
        else:
            k_tile = tl.load(k + offset, mask=(lane < DIM)[None, :], other=0.0)
            v_tile = tl.load(v + offset, mask=(lane < DIM)[None, :], other=0.0)
        logits = tl.dot(q_rows, k_tile.to(q_rows.dtype).T, input_precision="ieee")
        if KIND == INT8:
            if MASKED:
                logits *= tl.load(k_scales + slot, mask=owned, other=0.0)[None, :]
            else:
                logits *= tl.load(k_scales + slot)[None, :]
        if CAP:
            logits = soft_cap(logits * qk_scale, softcap)
        elif MASKED:
            logits *= qk_scale
        if MASKED:
            seen = here[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (here[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, LOWEST)
        if CAP or MASKED:
            new_top = tl.maximum(top, tl.max(logits, 1))
            p = tl.exp2(logits - new_top[:, None])
        else:  # scaling inside the exponent is one fused multiply-add, but not exact enough at LOWEST
            new_top = tl.maximum(top, tl.max(logits, 1) * qk_scale)
            p = tl.exp2(logits * qk_scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        result = result * fade[:, None]
        if KIND == INT8:
            if MASKED:
                p *= tl.load(v_scales + slot, mask=owned, other=0.0)[None, :]
            else:
                p *= tl.load(v_scales + slot)[None, :]
        result = tl.dot(p.to(PV_TYPE), v_tile.to(PV_TYPE), result, input_precision="ieee")
        top = new_top
    return top, total, result


@triton.jit(do_not_specialize=["table_stride", "window", "num_kv_heads", "num_seqs", "most_pages"])
def prefill_kernel(
    q,
    k,
    v,
    k_scales,
    v_scales,
    table,
    seq_lens,
    query_starts,
    header,
    prefill,
    out,
    q_stride,
    table_stride,
    num_seqs,
    num_kv_heads,
    qk_scale,
    v_scale,
    softcap,
    window,
    most_pages,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    QK_TYPE: tl.constexpr,
    PV_TYPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    BLOCK_ROWS: tl.constexpr = BLOCK // GROUP  # of the step; each has GROUP query heads here
    num_prefill = tl.load(header + 1)
    num_blocks = (tl.load(header + 2) + num_prefill * (BLOCK_ROWS - 1)) // BLOCK_ROWS
    num_blocks = tl.where(tl.load(header + 3) > most_pages, num_blocks, 0)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    line = tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    starts = prefill + num_seqs + 1

    for turn in range(0, tl.cdiv(num_blocks * num_kv_heads, programs)):
        work = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if work < num_blocks * num_kv_heads:
            kv_head = work % num_kv_heads
            block = num_blocks - 1 - work // num_kv_heads
            nth, block = sequence_of(starts, num_prefill, block, BLOCK_ROWS)
            seq = tl.load(prefill + nth)
            start = tl.load(query_starts + seq).to(tl.int32)
            rows = tl.load(query_starts + seq + 1).to(tl.int32) - start
            length = tl.load(seq_lens + seq).to(tl.int32)
            if block * BLOCK_ROWS < rows:
                step_row = block * BLOCK_ROWS + line // GROUP
                real = (step_row < rows) & (line < BLOCK_ROWS * GROUP)
                position = length - rows + step_row
                head = kv_head * GROUP + line % GROUP
                row = (start + step_row).to(tl.int64)
                mask = real[:, None] & (lane < DIM)[None, :]
                q_at = q + (row * q_stride + head * DIM)[:, None] + lane[None, :]
                q_rows = tl.load(q_at, mask=mask, other=0.0).to(QK_TYPE)

                first_position = length - rows + block * BLOCK_ROWS
                end = tl.minimum(first_position + BLOCK_ROWS, length)  # past the block's last position
                last_tile = tl.cdiv(end, TILE)
                full_to = (first_position + 1) // TILE
                seen_from = 0
                first_tile = 0
                full_from = 0
                if WINDOW:
                    seen_from = tl.maximum(first_position + 1 - window, 0)
                    first_tile = seen_from // TILE
                    full_from = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), TILE), last_tile)
                    full_to = tl.maximum(full_to, full_from)
                top = tl.full((BLOCK,), LOWEST, tl.float32)
                total = tl.zeros((BLOCK,), tl.float32)
                result = tl.zeros((BLOCK, LANES), tl.float32)
                pages = table + seq.to(tl.int64) * table_stride
                if WINDOW:
                    top, total, result = _tiles(
                        top, total, result, q_rows, position, k, v, k_scales, v_scales, pages, kv_head,
                        num_kv_heads, first_tile, full_from, seen_from, length, qk_scale, softcap, window,
                        DIM, LANES, PAGE, TILE, KIND, PV_TYPE, True, WINDOW, CAP,
                    )  # fmt: skip
                top, total, result = _tiles(
                    top, total, result, q_rows, position, k, v, k_scales, v_scales, pages, kv_head,
                    num_kv_heads, full_from, full_to, seen_from, length, qk_scale, softcap, window,
                    DIM, LANES, PAGE, TILE, KIND, PV_TYPE, False, WINDOW, CAP,
                )  # fmt: skip
                top, total, result = _tiles(
                    top, total, result, q_rows, position, k, v, k_scales, v_scales, pages, kv_head,
                    num_kv_heads, full_to, last_tile, seen_from, length, qk_scale, softcap, window,
                    DIM, LANES, PAGE, TILE, KIND, PV_TYPE, True, WINDOW, CAP,
                )  # fmt: skip
                result = result * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
                out_at = out + (row * (num_kv_heads * GROUP) + head)[:, None] * DIM + lane[None, :]
                tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)
