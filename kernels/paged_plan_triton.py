# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Who computes what in a step of paged attention, decided on the GPU from tensors that are already there.

Attention of one row over L tokens is cut into pieces of whole units of 64 tokens, so that a few long
sequences fill a GPU as well as many short ones. The cut depends on all lengths, and the host must not wait
for them: one small program reads them once a step and writes

    items     one record per piece: row, sequence, first unit, last unit, length, piece, pieces of the row
    prefill   the sequences of more than one row, closed up, with their first rows and first pages if all
              their pages lay one after the other

Grids are launched for the largest number of pieces that a batch of B rows can have; programs beyond the real
number leave at once. So nothing about a launch depends on lengths, and a CUDA graph of a step stays right.

A step of at most B rows for B sequences is decode: every row is treated as a sequence of its own, whatever
sequence it belongs to, and rows that no sequence has get length zero. In a longer step the sequences with one
row go that way and the others to the prefill kernel. Both kernels decide by the same numbers on the device.

How long is a piece? Memory-bound programs share a multiprocessor's bandwidth, so time goes with the fullest
multiprocessor: (programs / multiprocessors, rounded up) x (units + a constant for starting). The planner
tries a few lengths and takes the cheapest, the longest among equals. Every sum has a fixed order: same
lengths, same cut, same bits.

The planner runs beside the kernel in front (programmatic dependent launch): what it reads was there before
the step began. It waits before it writes, for its room may be what that kernel still reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.rows_triton import INTERPRETED

UNIT = 64  # tokens; every tile of the decode kernel divides it or is a multiple of it
MIN_ROUNDS, MAX_ROUNDS = 3, 4  # programs per multiprocessor that the planner tries
MAX_PIECES = 128  # of one row: bounds the sum over pieces that the last one makes
START_COST = 1  # in units, of one more program
EARLY = not INTERPRETED
ITEM = tl.constexpr(8)  # int32 per record: 32 bytes, one sector


class RowPlan(NamedTuple):
    """The cut of one step for layers of one geometry; all int32, on the step's device."""

    batch: PagedBatch
    geometry: Geometry
    header: Tensor  # [4]: number of items, of prefill sequences, of their rows, of their pages
    items: Tensor  # [max_items, 8]
    counters: Tensor  # [max_items, Hkv], zero: how many pieces of a row are done
    prefill: Tensor  # [3, B + 1]: sequences; first rows, first pages, in both the last entry their sum
    read: list[bool]  # grows with every kernel that has waited for the plan; so has all that comes after


def max_items(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Pieces that the planner may make of `num_rows` rows of any lengths, rounded up.

    To a multiple of 4: so all parts of a plan are aligned to 16 bytes, for any batch, and no batch makes
    Triton compile the kernels again for pointers that are not.
    """
    return -(-(num_rows + -(-MAX_ROUNDS * num_sms // num_kv_heads)) // 4) * 4


def plan_rows(batch: PagedBatch, geometry: Geometry, num_sms: int) -> RowPlan:
    """Launches the planner; nothing here waits for the device."""
    num_seqs = len(batch.seq_lens)
    bound = max_items(num_seqs, geometry.num_kv_heads, num_sms)
    num_counters = bound * geometry.num_kv_heads
    # all begin at multiples of 16 bytes, for whose sake kernels would be compiled in two variants
    sizes = (4, bound * 8, num_counters + -num_counters % 4, 3 * (num_seqs + 1))
    header, items, counters, prefill = torch.empty(
        sum(sizes), dtype=torch.int32, device=batch.seq_lens.device
    ).split(sizes)
    counters = counters[:num_counters]
    _plan[(1,)](
        batch.seq_lens,
        batch.query_starts,
        header,
        items,
        counters,
        prefill,
        num_seqs,
        geometry.window or 0,
        geometry.num_kv_heads,
        geometry.page_size,
        num_sms,
        UNIT,
        MIN_ROUNDS,
        MAX_ROUNDS,
        MAX_PIECES,
        START_COST,
        BLOCK=max(64, triton.next_power_of_2(num_seqs)),
        EARLY=EARLY,
        launch_pdl=EARLY,
    )
    records, counts = items.view(-1, 8), counters.view(bound, -1)
    return RowPlan(batch, geometry, header, records, counts, prefill.view(3, -1), read=[])


@triton.jit(do_not_specialize=["num_seqs", "window", "num_kv_heads", "page_size", "num_sms"])
def _plan(
    seq_lens,
    query_starts,
    header,
    items,
    counters,
    prefill,
    num_seqs,
    window,
    num_kv_heads,
    page_size,
    num_sms,
    UNIT: tl.constexpr,
    MIN_ROUNDS: tl.constexpr,
    MAX_ROUNDS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    START_COST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        cuda.gdc_launch_dependents()
    slot = tl.arange(0, BLOCK)
    inside = slot < num_seqs
    num_rows = tl.load(query_starts + num_seqs).to(tl.int32)
    all_rows = num_rows <= num_seqs

    # the slot's sequence: the last one that begins at or before row `slot`, or simply the slot's own
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + num_seqs
    span = num_seqs
    while span > 1:
        middle = (low + high) // 2
        begins = tl.load(query_starts + middle, mask=inside, other=0).to(tl.int32) <= slot
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
        span = (span + 1) // 2
    seq = tl.where(all_rows, low, slot)
    start = tl.load(query_starts + seq, mask=inside, other=0).to(tl.int32)
    stop = tl.load(query_starts + seq + 1, mask=inside, other=0).to(tl.int32)
    seq_len = tl.load(seq_lens + seq, mask=inside, other=0).to(tl.int32)
    row = tl.where(all_rows, slot, start)
    length = tl.where(row < num_rows, tl.maximum(seq_len - (stop - 1 - row), 0), 0)
    rows = tl.where(all_rows, 1, stop - start)
    is_item = inside & (rows == 1)
    is_prefill = inside & (rows > 1)

    first = tl.where(window > 0, tl.maximum(length - window, 0), 0) // UNIT
    last = (length + UNIT - 1) // UNIT
    units = tl.where(is_item, last - first, 0)
    most = tl.max(units, 0)
    total = tl.sum(units, 0) * num_kv_heads

    best_cost = 2147483647
    best = tl.maximum(most, 1)
    for rounds in tl.static_range(MIN_ROUNDS, MAX_ROUNDS + 1):
        length_of_piece = tl.maximum(tl.cdiv(total, num_sms * rounds), tl.cdiv(most, MAX_PIECES))
        length_of_piece = tl.maximum(length_of_piece, 1)
        pieces = tl.maximum((units + length_of_piece - 1) // length_of_piece, 1)
        longest = tl.max((units + pieces - 1) // pieces, 0)
        programs = tl.sum(tl.where(is_item, pieces, 0), 0) * num_kv_heads
        cost = tl.cdiv(programs, num_sms) * (longest + START_COST)
        best = tl.where(cost < best_cost, length_of_piece, best)
        best_cost = tl.minimum(cost, best_cost)

    pieces = tl.where(is_item, tl.maximum((units + best - 1) // best, 1), 0)
    first_item = tl.cumsum(pieces, 0) - pieces
    num_items = tl.sum(pieces, 0)
    prefilled = is_prefill.to(tl.int32)
    rank = tl.cumsum(prefilled, 0) - 1
    num_prefill = tl.sum(prefilled, 0)
    first_rows, num_prefill_rows = _closed_up(tl.where(is_prefill, rows, 0))
    num_pages = tl.where(is_prefill, (seq_len + page_size - 1) // page_size, 0)
    first_pages, num_prefill_pages = _closed_up(num_pages)

    if EARLY:
        cuda.gdc_wait()
    for piece in range(0, tl.max(pieces, 0)):
        mask = piece < pieces
        share = tl.maximum(pieces, 1)
        record = items + (first_item + piece) * ITEM
        tl.store(record, row, mask)
        tl.store(record + 1, seq, mask)
        tl.store(record + 2, first + piece * units // share, mask)
        tl.store(record + 3, first + (piece + 1) * units // share, mask)
        tl.store(record + 4, length, mask)
        tl.store(record + 5, piece + tl.zeros_like(row), mask)
        tl.store(record + 6, pieces, mask)
    for at in range(0, num_items * num_kv_heads, BLOCK):
        tl.store(counters + at + slot, tl.zeros_like(slot), mask=at + slot < num_items * num_kv_heads)

    tl.store(prefill + rank, seq, mask=is_prefill)
    firsts = prefill + num_seqs + 1
    tl.store(firsts + rank, first_rows, mask=is_prefill)
    tl.store(firsts + num_prefill, num_prefill_rows)
    firsts += num_seqs + 1
    tl.store(firsts + rank, first_pages, mask=is_prefill)
    tl.store(firsts + num_prefill, num_prefill_pages)
    tl.store(header, num_items)
    tl.store(header + 1, num_prefill)
    tl.store(header + 2, num_prefill_rows)
    tl.store(header + 3, num_prefill_pages)


@triton.jit
def _closed_up(counts):
    """Where each begins if they lie one after the other, and their sum."""
    return tl.cumsum(counts, 0) - counts, tl.sum(counts, 0)
