# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of single rows over paged K and V: the kernel of decoding.

One program takes one piece of one row's tokens (`paged_plan_triton`) for one KV head, with all the query
heads that share it: K and V are read once. It is bound by memory, so everything serves to keep loads in
flight: page ids are loaded one tile ahead (`paged_walk_triton`), and masks are data, not branches.

Softmax is online, in base 2. A row of one piece is finished here. Otherwise each piece leaves its sums, and
the program that finishes last, known by an atomic counter, adds the pieces up in their order, whichever
order they came in, and sets the counter back to zero.

The kernel starts while the one in front still works. With `head_start` 0 it only waits then; with 1 it reads
its item and its first page id as well, as the plan is known to have been written long ago; with 2 it also
asks the L2 cache for its first unit of K and V, which is worth it where few programs share the memory. Nobody
minds that the row's newest token is being written: what is in the L2 cache is what everybody sees.

What nobody owns may be NaN. K beyond the row's tokens only reaches logits that are overwritten; V there, and
before a window, would turn 0 * NaN into NaN, so it is loaded as zero.

(A prototype of this kernel died of an illegal access while it was timed, with 256 rows of 640 tokens in fp8.
Triton's do_bench_cudagraph runs on a stream of its own, which does not wait for the one that makes the
inputs: it read the table before it was written. With one synchronization before timing the fault is gone,
with a table that is written late it comes every time, and a memory checker finds nothing in the kernel.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from qinfer.kernels.kv_unpack_triton import INT8, PLAIN, unpack_pairs
from qinfer.kernels.paged_plan_triton import ITEM
from qinfer.kernels.paged_walk_triton import LOWEST, page_ids, slots_of, soft_cap
from qinfer.kernels.pieces_triton import fetch_ahead


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window", "num_kv_heads", "head_start"])
def decode_kernel(
    q,
    k,
    v,
    k_scales,
    v_scales,
    table,
    header,
    items,
    counters,
    out,
    sums,
    stats,
    q_stride,
    num_rows,
    table_stride,
    num_kv_heads,
    qk_scale,
    v_scale,
    softcap,
    window,
    head_start,  # how much is done before the kernel in front has ended
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP as a power of two
    DIM: tl.constexpr,
    LANES: tl.constexpr,  # DIM, or DIM / 2 of paired numbers, as a power of two
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    QK_TYPE: tl.constexpr,
    PV_TYPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
    MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:  # noqa: SIM102  the one is known when this is compiled
        if head_start == 0:
            cuda.gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * ITEM
    row = tl.load(record)
    seq = tl.load(record + 1)
    begin = tl.load(record + 2) * UNIT
    end = tl.load(record + 3) * UNIT
    length = tl.load(record + 4)
    piece = tl.load(record + 5)
    pieces = tl.load(record + 6)
    # All fields decide, though two would do: so they are loaded at once, not one after the other when needed.
    if (item >= tl.load(header)) | (row >= num_rows) | (seq < 0) | (begin < 0) | (end < 0) | (length < 0):
        if EARLY:  # or this kernel might end before the one in front
            cuda.gdc_wait()
        return

    WIDTH: tl.constexpr = DIM if KIND == PLAIN else DIM // 2
    SCALAR: tl.constexpr = PAGE % TILE == 0 and UNIT % TILE == 0
    pages = table + seq.to(tl.int64) * table_stride
    stop = tl.minimum(length, end)
    page = page_ids(pages, begin, stop, TILE, PAGE, SCALAR)
    if EARLY:
        if SCALAR:  # noqa: SIM102
            if (head_start == 2) & (begin < stop):
                BYTES: tl.constexpr = k.dtype.element_ty.primitive_bitwidth // 8
                first = (page * num_kv_heads + kv_head) * PAGE + begin % PAGE
                size = tl.minimum(PAGE - begin % PAGE, UNIT) * (WIDTH * BYTES)
                fetch_ahead(k + first * WIDTH, size)
                fetch_ahead(v + first * WIDTH, size)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

    head = tl.arange(0, 16)
    lane = tl.arange(0, LANES)
    token = tl.arange(0, TILE)
    OUT: tl.constexpr = LANES if KIND == PLAIN else 2 * LANES
    real_lane = lane < WIDTH
    column = tl.arange(0, OUT)
    q_at = q + row.to(tl.int64) * q_stride + (kv_head * GROUP + head)[:, None] * DIM
    q_mask = (head < GROUP)[:, None] & (column < DIM)[None, :]
    q_rows = tl.load(q_at + column[None, :], mask=q_mask, other=0.0).to(QK_TYPE)
    if KIND == PLAIN:
        q_even, q_odd = q_rows, q_rows
    else:
        q_even, q_odd = tl.split(tl.reshape(q_rows, (16, LANES, 2)))

    top = tl.full((16,), LOWEST, tl.float32)
    weights = tl.zeros((16, TILE), tl.float32)  # summed over tiles only: adding up a row crosses warps
    even = tl.zeros((16, LANES), tl.float32)
    odd = tl.zeros((16, LANES), tl.float32)
    lowest = tl.maximum(length - window, 0) if WINDOW else 0

    for at in tl.range(begin, end, TILE):
        here = at + token
        slot = slots_of(page, at, kv_head, num_kv_heads, TILE, PAGE, SCALAR)
        page = page_ids(pages, at + TILE, stop, TILE, PAGE, SCALAR)
        owned = (here < stop) & (here >= lowest) if WINDOW else here < stop
        offset = slot[:, None] * WIDTH + lane[None, :]
        if LANES == WIDTH:
            k_tile = tl.load(k + offset)
            v_tile = tl.load(v + offset, mask=owned[:, None], other=0)
        else:
            k_tile = tl.load(k + offset, mask=real_lane[None, :], other=0)
            v_tile = tl.load(v + offset, mask=owned[:, None] & real_lane[None, :], other=0)
        if KIND == PLAIN:
            logits = tl.dot(q_even, k_tile.T, input_precision="ieee")
        else:
            k_even, k_odd = unpack_pairs(k_tile, KIND, QK_TYPE, ASM)
            logits = tl.dot(q_even, k_even.T, input_precision="ieee")
            logits = tl.dot(q_odd, k_odd.T, logits, input_precision="ieee")
        if KIND == INT8:
            logits *= (tl.load(k_scales + slot) * qk_scale)[None, :]
        else:
            logits *= qk_scale
        if CAP:
            logits = soft_cap(logits, softcap)
        logits = tl.where(owned[None, :], logits, LOWEST)
        new_top = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - new_top[:, None])
        fade = tl.exp2(top - new_top)
        weights = weights * fade[:, None] + p
        even = even * fade[:, None]
        if KIND == PLAIN:
            even = tl.dot(p.to(PV_TYPE), v_tile, even, input_precision="ieee")
        else:
            if KIND == INT8:
                p *= tl.where(owned, tl.load(v_scales + slot), 0.0)[None, :]
            p = p.to(PV_TYPE)
            v_even, v_odd = unpack_pairs(v_tile, KIND, PV_TYPE, ASM)
            odd = odd * fade[:, None]
            even = tl.dot(p, v_even, even, input_precision="ieee")
            odd = tl.dot(p, v_odd, odd, input_precision="ieee")
        top = new_top

    total = tl.sum(weights, 1)
    out_at = out + (row.to(tl.int64) * num_kv_heads + kv_head) * GROUP * DIM
    if pieces == 1:
        result = even if KIND == PLAIN else tl.reshape(tl.join(even, odd), (16, OUT))
        result = result * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
        mask = (head < GROUP)[:, None] & (column < DIM)[None, :]
        tl.store(out_at + head[:, None] * DIM + column[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        base = (item - piece) * num_kv_heads + kv_head  # of the row's first piece
        part = (base + piece * num_kv_heads).to(tl.int64)
        real = (head < ROWS)[:, None]
        sums_at = sums + (part * ROWS + head[:, None]) * OUT + lane[None, :]
        tl.store(sums_at, even, mask=real)
        if KIND != PLAIN:
            tl.store(sums_at + LANES, odd, mask=real)
        tl.store(stats + part * 2 * ROWS + head, top, mask=head < ROWS)
        tl.store(stats + part * 2 * ROWS + ROWS + head, total, mask=head < ROWS)
        tl.debug_barrier()
        if tl.atomic_add(counters + base, 1, sem="acq_rel") == pieces - 1:
            _merge(
                sums, stats, out_at, base, pieces, num_kv_heads, v_scale, GROUP, ROWS, DIM, LANES, OUT, MERGE
            )
            tl.store(counters + base, 0)


@triton.jit
def _merge(
    sums,
    stats,
    out_at,
    base,
    pieces,
    num_kv_heads,
    v_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    OUT: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Adds up a row's pieces, MERGE at a time, in their order; of pairs, all even dimensions come first."""
    some = tl.arange(0, MERGE)
    head = tl.arange(0, ROWS)
    column = tl.arange(0, OUT)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, OUT), tl.float32)
    for at in tl.range(0, pieces, MERGE, num_stages=1):
        real = at + some < pieces
        part = (base + (at + some) * num_kv_heads).to(tl.int64)
        where = stats + part[:, None] * 2 * ROWS + head[None, :]
        tops = tl.load(where, mask=real[:, None], other=LOWEST)
        totals = tl.load(where + ROWS, mask=real[:, None], other=0.0)
        values = tl.load(
            sums + (part[:, None, None] * ROWS + head[None, :, None]) * OUT + column[None, None, :],
            mask=real[:, None, None],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - new_top[None, :])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(totals * weight, 0)
        result = result * fade[:, None] + tl.sum(values * weight[:, :, None], 0)
        top = new_top
    result = result * (v_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    dim = column % LANES * (OUT // LANES) + column // LANES
    mask = (head < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(out_at + head[:, None] * DIM + dim[None, :], result.to(out_at.dtype.element_ty), mask=mask)
