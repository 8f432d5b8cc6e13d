# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Pages of 8 bits as pages of 16, for the chunks of a step.

The tensor cores take K and V of many rows from shared memory, where they must be as wide as the queries. All
rows of a chunk read the same tokens, a long one's many times: so these are widened once, into scratch pages
that lie one after the other, and the kernel for plain pages runs on them with a table of its own. That moves
some megabytes more, and costs far less than to widen again for every block of rows.

fp8 keeps its scale, one for the tensor, outside; its numbers are exact. int8 times its token's scale is
rounded to the queries' dtype, as pages of that dtype would have been.

Scratch is limited, and how many pages a step's chunks have is known on the device only. Beyond the limit
nothing is widened, and `paged_prefill_triton` reads the pages as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.paged_plan_triton import RowPlan
from qinfer.kernels.paged_walk_triton import sequence_of

# Scratch for so many tokens, so many per row (a token that few rows read is as well read as it is), and in so
# many bytes of K and V together; but for no less than the rows of a step themselves need.
SCRATCH_TOKENS, TOKENS_PER_ROW, SCRATCH_BYTES = 32768, 20, 128 << 20
TILE = 64  # tokens at a time


class Widened(NamedTuple):
    """Scratch pages [most_pages, Hkv, PAGE, D] and a table of them like the step's."""

    k: Tensor
    v: Tensor
    table: Tensor


def widened(pages: KVPages, plan: RowPlan, num_rows: int, dtype: torch.dtype, num_programs: int) -> Widened:
    """The pages of a step's chunks in `dtype`, unless they are more than there is scratch for."""
    num_kv_heads, page_size, dim = pages.k.shape[1:]
    table, num_seqs = plan.batch.page_table, len(plan.batch.seq_lens)
    page_bytes = 2 * num_kv_heads * page_size * dim * dtype.itemsize
    tokens = min(SCRATCH_TOKENS, TOKENS_PER_ROW * num_rows)
    most_pages = min(tokens // page_size, SCRATCH_BYTES // page_bytes)
    # each sequence may fill its last page with a single row
    most_pages = max(most_pages, num_rows // page_size + num_seqs)
    k, v = (
        torch.empty(most_pages, num_kv_heads, page_size, dim, dtype=dtype, device=table.device)
        for _ in range(2)
    )
    wide_table = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    widen_pages[(num_programs,)](
        pages.k,
        pages.v,
        pages.k_scales,
        pages.v_scales,
        table,
        plan.header,
        plan.prefill,
        k,
        v,
        wide_table,
        table.stride(0),
        wide_table.stride(0),
        num_seqs,
        num_kv_heads,
        most_pages,
        **widen_constants(dim, page_size),
    )
    return Widened(k, v, wide_table)


def widen_constants(dim: int, page_size: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {"DIM": dim, "LANES": triton.next_power_of_2(dim), "PAGE": page_size, "TILE": min(TILE, page_size)}


@triton.jit(do_not_specialize=["table_stride", "wide_stride", "num_seqs", "num_kv_heads", "most_pages"])
def widen_pages(
    k,
    v,
    k_scales,
    v_scales,
    table,
    header,
    prefill,
    wide_k,
    wide_v,
    wide_table,
    table_stride,
    wide_stride,
    num_seqs,
    num_kv_heads,
    most_pages,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program takes every n-th page of a head."""
    num_prefill = tl.load(header + 1)
    num_pages = tl.load(header + 3)
    firsts = prefill + 2 * (num_seqs + 1)
    token = tl.arange(0, TILE)
    num_items = tl.where(num_pages > most_pages, 0, num_pages * num_kv_heads)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % num_kv_heads
        wide_page = item // num_kv_heads
        rank, nth = sequence_of(firsts, num_prefill, wide_page, 1)
        seq = tl.load(prefill + rank).to(tl.int64)
        page = tl.load(table + seq * table_stride + nth)
        if kv_head == 0:
            tl.store(wide_table + seq * wide_stride + nth, wide_page.to(tl.int64))
        for first in tl.static_range(0, PAGE, TILE):
            source = (page * num_kv_heads + kv_head) * PAGE + first + token
            target = (wide_page.to(tl.int64) * num_kv_heads + kv_head) * PAGE + first + token
            _widen(k, k_scales, wide_k, source, target, DIM, LANES)
            _widen(v, v_scales, wide_v, source, target, DIM, LANES)


@triton.jit
def _widen(pages, scales, wide, source, target, DIM: tl.constexpr, LANES: tl.constexpr):
    """Rows `source` of 8-bit pages to rows `target` of wide ones."""
    lane = tl.arange(0, LANES)
    mask = (lane < DIM)[None, :]
    numbers = tl.load(pages + source[:, None] * DIM + lane[None, :], mask=mask).to(tl.float32)
    if scales is not None:
        numbers *= tl.load(scales + source)[:, None]
    at = wide + target[:, None] * DIM + lane[None, :]
    tl.store(at, numbers.to(wide.dtype.element_ty), mask=mask)
