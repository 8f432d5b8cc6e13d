"""Attention over paged K and V: the meaning, arranged so that a CPU runs it fast.

Each row of a step asks about its own sequence's pages, up to and including itself. Rows are cut into groups
that one gather and one scaled_dot_product_attention serve: decode rows of similar length together (padded to
the longest and masked; a bucket never holds lengths further apart than a factor of two), a prefill chunk in
blocks of 512 rows. K and V are always read back from the pages, also by the chunk that has just written
them, so that what a token sees does not depend on how its prompt was split.

What lies in a page beyond a sequence's length may be anything, also NaN: -inf + NaN and 0 * NaN are NaN, so
padded K and V are overwritten with zeros after the gather; a mask alone would let them through.

`group_rows` depends on the step only and is shared by all layers of equal window. Softmax is in float32
(inside torch's own kernel, or explicitly where logits are soft-capped, Gemma 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qinfer.kernels.kv_format import KVPages, load

BLOCK_ROWS = 512  # of a prefill chunk: bounds the mask at 512 x length


class PagedBatch(NamedTuple):
    """Where a step's B sequences have their pages; all int64.

    page_table [B, max_pages], padded with anything valid; seq_lens [B] tokens including this step's;
    query_starts [B + 1]: rows query_starts[b] to query_starts[b + 1] are the last tokens of sequence b.
    """

    page_table: Tensor
    seq_lens: Tensor
    query_starts: Tensor


class RowGroup(NamedTuple):
    """Rows answered together: S sequences with Q consecutive rows each, over L gathered tokens of K and V."""

    rows: slice | Tensor  # of the step, S * Q of them
    num_seqs: int  # S; Q is 1 where it exceeds 1
    pages: Tensor  # [S * Hkv * num_pages]: page * Hkv + head, for the gather
    span: slice  # the L tokens of the gathered pages that count
    mask: Tensor | None  # added to the logits, 0 or -inf: [S, 1, 1, L] or [1, 1, Q, L]; None: all is seen
    padding: Tensor | None  # rows of the gathered [S * Hkv * num_pages * PAGE] that hold no token of theirs


class Geometry(NamedTuple):
    """What the grouping needs to know of a layer; `dtype` is that of q."""

    num_kv_heads: int
    page_size: int
    window: int | None
    dtype: torch.dtype


def group_rows(batch: PagedBatch, geometry: Geometry) -> tuple[RowGroup, ...]:
    """Cuts a step's rows into groups, once for all layers of equal geometry (window None: no limit)."""
    lens = batch.seq_lens.tolist()
    starts = batch.query_starts.tolist()
    decode = [b for b in range(len(lens)) if starts[b + 1] - starts[b] == 1]
    groups = [
        _decode_group(batch, [lens[b] for b in bucket], bucket, starts, geometry)
        for bucket in _buckets(decode, lens)
    ]
    for b in range(len(lens)):
        if starts[b + 1] - starts[b] > 1:
            groups += _chunk_groups(batch.page_table[b], lens[b], starts[b], starts[b + 1], geometry)
    return tuple(groups)


def _buckets(decode: list[int], lens: list[int]) -> Iterator[list[int]]:
    """Rows of similar length, each bucket in row order."""
    bucket: list[int] = []
    for b in sorted(decode, key=lens.__getitem__):
        if bucket and lens[b] > max(2 * lens[bucket[0]], lens[bucket[0]] + 128):
            yield sorted(bucket)
            bucket = []
        bucket.append(b)
    if bucket:
        yield sorted(bucket)


def _gather_index(pages: Tensor, num_kv_heads: int) -> Tensor:
    """[S, P] pages -> flat [S * Hkv * P] rows of the pool seen as [num_pages * Hkv, PAGE * D]."""
    heads = torch.arange(num_kv_heads, device=pages.device)
    return (pages.unsqueeze(1) * num_kv_heads + heads.view(1, -1, 1)).flatten()


def _decode_group(
    batch: PagedBatch, lens: list[int], bucket: list[int], starts: list[int], geometry: Geometry
) -> RowGroup:
    heads, size, window, dtype = geometry
    device = batch.page_table.device
    low = max(0, min(lens) - window) // size if window else 0  # the first page that anyone still sees
    high = -(-max(lens) // size)
    rows = [starts[b] for b in bucket]
    contiguous = rows[-1] - rows[0] == len(rows) - 1
    pages = _gather_index(batch.page_table[bucket, low:high], heads)
    base = low * size
    where = slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows, device=device)
    if min(lens) == max(lens):
        first = max(0, lens[0] - window) if window else 0
        return RowGroup(where, len(rows), pages, slice(first - base, lens[0] - base), None, None)
    token = torch.arange(base, high * size, device=device)
    ends = torch.tensor(lens, device=device).unsqueeze(1)
    seen = token < ends  # [S, L]
    padding = (~seen).unsqueeze(1).expand(-1, heads, -1).flatten().nonzero().flatten()
    if window:
        seen = seen & (token >= ends - window)
    return RowGroup(
        where, len(rows), pages, slice(0, high * size - base), _mask(seen[:, None, None], dtype), padding
    )


def _chunk_groups(
    table: Tensor, length: int, start: int, stop: int, geometry: Geometry
) -> Iterator[RowGroup]:
    heads, size, window, dtype = geometry
    for first in range(start, stop, BLOCK_ROWS):
        rows = slice(first, min(stop, first + BLOCK_ROWS))
        end = length - (stop - rows.stop)  # tokens up to and including the block's last row
        begin = end - (rows.stop - rows.start)  # position of its first row
        low = max(0, begin + 1 - window) // size if window else 0
        token = torch.arange(low * size, end, device=table.device)
        position = torch.arange(begin, end, device=table.device).unsqueeze(1)
        seen = token <= position
        if window:
            seen = seen & (token > position - window)
        pages = _gather_index(table[None, low : -(-end // size)], heads)
        yield RowGroup(rows, 1, pages, slice(0, end - low * size), _mask(seen[None, None], dtype), None)


def _mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def paged_attention(
    q: Tensor, pages: KVPages, groups: tuple[RowGroup, ...], *, scale: float, softcap: float | None = None
) -> Tensor:
    """q [T, Hq, D] over the pages that `groups` name -> [T, Hq, D] in q's dtype; `scale` multiplies q.k.

    `softcap` c turns a logit s into c * tanh(s / c). Query head h reads KV head h // (Hq / Hkv).
    """
    if len(groups) == 1:  # which then has every row: a step of decode alone is spared the copy
        return _attend(q, pages, groups[0], scale, softcap)
    out = torch.empty_like(q)
    for group in groups:
        out[group.rows] = _attend(q[group.rows], pages, group, scale, softcap)
    return out


def _attend(q: Tensor, pages: KVPages, group: RowGroup, scale: float, softcap: float | None) -> Tensor:
    num_rows, num_heads, dim = q.shape
    num_kv_heads = pages.k.shape[1]
    k = _gather(pages.k, pages.k_scales, pages.k_scale, group, q.dtype)
    v = _gather(pages.v, pages.v_scales, pages.v_scale, group, q.dtype)
    if group.num_seqs == 1 and num_rows > 1:  # [1, Hq, Q, D]
        out = _sdpa(q.transpose(0, 1).unsqueeze(0), k, v, group.mask, scale, softcap)
        return out.squeeze(0).transpose(0, 1)
    # one row per sequence: the heads that share a KV head become the rows of one small product
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    return _sdpa(grouped, k, v, group.mask, scale, softcap).reshape(num_rows, num_heads, dim)


def _gather(
    stored: Tensor, scales: Tensor | None, scale: float, group: RowGroup, dtype: torch.dtype
) -> Tensor:
    """[S, Hkv, L, D] in `dtype`, zero where no token is."""
    _, num_kv_heads, size, dim = stored.shape
    flat = stored.view(-1, size * dim)
    if stored.element_size() == 1:  # index_select has no fp8; bytes are bytes
        numbers = flat.view(dtype=torch.uint8).index_select(0, group.pages).view(dtype=stored.dtype)
    else:
        numbers = flat.index_select(0, group.pages)
    if scales is None:
        values = load(numbers, None, scale, dtype)
    else:
        row_scales = scales.view(-1, size).index_select(0, group.pages).view(-1)
        values = load(numbers.view(-1, dim), row_scales, scale, dtype)
    if group.padding is not None:
        values.view(-1, dim).index_fill_(0, group.padding, 0)
    first, stop = group.span.start, group.span.stop
    of_head = values.numel() // (group.num_seqs * num_kv_heads)  # one call where view and narrow are two
    return values.as_strided(
        (group.num_seqs, num_kv_heads, stop - first, dim),
        (num_kv_heads * of_head, of_head, dim, 1),
        values.storage_offset() + first * dim,
    )


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Softmax attention of q [S, H, Q, D] over k, v [S, Hkv, L, D]."""
    repeat = q.shape[1] // k.shape[1]
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=repeat > 1)
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    logits = torch.tanh(q.float() @ k.float().transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is not None:
        logits = logits + mask
    return (logits.softmax(-1) @ v.float()).to(q.dtype)
