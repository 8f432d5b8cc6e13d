"""Launches attention for the chunks of a step: its sequences with several rows.

On Hopper, and for the shapes that it takes, `paged_prefill_warps_triton` does the work. It reads pages as
wide as the queries; 8-bit pages are widened before, where there is scratch for them all. Only the device
knows whether, so both ways are launched, and one of them ends at once. The rest is `paged_prefill_triton`'s.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.kv_unpack_triton import PLAIN
from qinfer.kernels.paged_plan_triton import RowPlan
from qinfer.kernels.paged_prefill_triton import prefill_kernel
from qinfer.kernels.paged_prefill_warps_triton import prefill_by_warps
from qinfer.kernels.paged_shapes_triton import (
    WARPS_BLOCK,
    WARPS_TILE,
    Shape,
    by_warps_takes,
    machine_of,
    prefill_constants,
    prefill_formula,
    table_name,
    warps_constants,
)
from qinfer.kernels.paged_widen_triton import widened
from qinfer.kernels.tiles import tile
from qinfer.kernels.warps_triton import descriptor

Numbers = tuple[float, float, float, int]  # factor of the logits and of the output, cap, window
ALL_PAGES = (1 << 31) - 1
WIDENING_PROGRAMS = 8  # per multiprocessor


class Call(NamedTuple):
    """One layer's attention, as its launches need it."""

    q: Tensor  # [T, Hq, D]
    plan: RowPlan
    out: Tensor  # [T, Hq, D]
    shape: Shape
    numbers: Numbers


def attend_chunks(call: Call, pages: KVPages) -> None:
    """Writes the rows of `call.out` that belong to chunks."""
    machine, q = machine_of(call.q.device), call.q
    if machine.capability != 9 or not by_warps_takes(call.shape):
        _by_tiles(call, pages, -1)
    elif call.shape.kind == PLAIN.value:
        _by_warps(call, pages.k, pages.v, call.plan.batch.page_table, ALL_PAGES)
    else:
        wide = widened(pages, call.plan, len(q), q.dtype, WIDENING_PROGRAMS * machine.num_sms)
        _by_warps(call, wide.k, wide.v, wide.table, len(wide.k))
        _by_tiles(call, pages, len(wide.k))


def _by_tiles(call: Call, pages: KVPages, most_pages: int) -> None:
    """By the kernel that takes everything, if the chunks have more than `most_pages` pages."""
    q, plan, out, shape, numbers = call
    num_kv_heads, num_seqs, machine = pages.k.shape[1], len(plan.batch.seq_lens), machine_of(q.device)
    op, itemsize = table_name("prefill", shape.kind), pages.k.itemsize
    entry = dict(tile(op, machine.key, prefill_formula, len(q), shape.dim, itemsize))
    programs = min(
        num_blocks(len(q), num_seqs, entry["BLOCK"] // shape.group) * num_kv_heads,
        machine.num_sms * entry.pop("per_sm"),
    )
    prefill_kernel[(programs,)](
        q,
        pages.k,
        pages.v,
        pages.k_scales,
        pages.v_scales,
        plan.batch.page_table,
        plan.batch.seq_lens,
        plan.batch.query_starts,
        plan.header,
        plan.prefill,
        out,
        q.stride(0),
        plan.batch.page_table.stride(0),
        num_seqs,
        num_kv_heads,
        *numbers,
        most_pages,
        **prefill_constants(entry, shape),
    )


def _by_warps(call: Call, k: Tensor, v: Tensor, table: Tensor, most_pages: int) -> None:
    """By the kernel for pages of q's dtype, if the chunks have no more than `most_pages` pages."""
    q, plan, out, shape, numbers = call
    num_kv_heads, num_seqs = k.shape[1], len(plan.batch.seq_lens)
    blocks = num_blocks(len(q), num_seqs, WARPS_BLOCK // shape.group)
    programs = min(blocks * num_kv_heads, machine_of(q.device).num_sms)
    k_tiles, v_tiles = (descriptor(t.view(-1, shape.dim), [WARPS_TILE, shape.dim]) for t in (k, v))
    prefill_by_warps[(programs,)](
        q,
        k_tiles,
        v_tiles,
        table,
        plan.batch.seq_lens,
        plan.batch.query_starts,
        plan.header,
        plan.prefill,
        out,
        q.stride(0),
        table.stride(0),
        num_seqs,
        num_kv_heads,
        *numbers[:2],
        most_pages,
        **warps_constants(shape),
    )


def num_blocks(num_rows: int, num_seqs: int, block_rows: int) -> int:
    """Blocks of rows of one sequence each that a step can have."""
    return (num_rows + num_seqs * (block_rows - 1)) // block_rows
