"""Attention, without a cache and through the pages of one, and the writing of K and V into pages."""

from __future__ import annotations

from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qinfer import backend
from qinfer.kernels import attention as _attention
from qinfer.kernels import kv_format as _kv_format
from qinfer.kernels import paged_attention as _paged_attention
from qinfer.kernels import qkv_post as _qkv_post
from qinfer.kernels import write_kv as _write_kv
from qinfer.kernels import write_kv_cpu as _write_kv_cpu
from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.qkv_post import HeadNorms
from qinfer.ops.forms import Parts, Product

Groups: TypeAlias = Any
"""How a step's pages are read: `RowGroup`s or the plan of a GPU's kernels, from `group_rows` alone."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_sequences: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of equally long sequences: q [B*T, Hq, D], k and v [B*T, Hkv, D] -> [B*T, Hq, D]."""
    return _attention.attention(
        q, k, v, num_sequences=num_sequences, scale=scale, window=window, softcap=softcap
    )


def kv_dtype(name: str) -> torch.dtype:
    """The stored dtype that a resolved kv_cache_dtype names ("fp8": e4m3)."""
    return _kv_format.DTYPES[name]


def kv_places(slots: Tensor, geometry: Geometry) -> Tensor:
    """What `write_kv` takes for slots [T] int64 (page * PAGE + offset); once per step for all layers."""
    if slots.is_cuda:
        return slots
    return _write_kv_cpu.slot_rows(slots, geometry.num_kv_heads, geometry.page_size)


def write_kv(k: Tensor, v: Tensor, pages: KVPages, places: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `places`, from `kv_places`, of a layer's pages, in place."""
    if k.is_cuda:
        return backend.run_in_place(_few_pages, _write_kv.write_kv, k, v, pages, places)
    _write_kv_cpu.write_kv_cpu(k, v, pages, places)


def qkv_post(
    qkv: Product,
    pages: KVPages,
    slots: Tensor,
    *,
    rotation: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    bias: Tensor | None,
) -> Tensor:
    """Bias, head norms, rotation and the writing of K and V in one pass, for a GPU: [T, N] -> q [T, Hq, D].

    Slots [T] as in `kv_places`; cos and sin [T, R] as in `rope`. All float32, rounded once.
    """
    data = qkv.sums if isinstance(qkv, Parts) else qkv
    rest: dict[str, Any] = {"rotation": rotation, "norms": norms, "bias": bias, "dtype": qkv.dtype}
    return backend.run_in_place(_few_pages, _qkv_post.qkv_post, data, pages, slots, **rest)


def _few_pages(*args: Any) -> backend.Rehearsal:
    """The arguments (..., pages, slots) with a copy of the pages that are touched: all may not fit twice."""
    *data, pages, slots = args
    assert isinstance(pages, KVPages)
    page, offset = slots.clamp(min=0) // pages.k.shape[2], slots.clamp(min=0) % pages.k.shape[2]
    touched, index = page.unique(return_inverse=True)

    def part() -> KVPages:
        k, v, k_scales, v_scales = (None if x is None else _picked(x, touched) for x in pages[:4])
        assert k is not None
        assert v is not None
        return KVPages(k, v, k_scales, v_scales, pages.k_scale, pages.v_scale)

    copy = part()
    return backend.Rehearsal((*data, copy, index * pages.k.shape[2] + offset), copy, part)


def _picked(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; indexing knows no fp8, but bytes are bytes."""
    return x[rows] if x.element_size() > 1 else x.view(torch.uint8)[rows].view(x.dtype)


def group_rows(batch: PagedBatch, geometry: Geometry) -> Groups:
    """How `paged_attention` will read a step's pages; once per step for all layers of equal geometry."""
    if batch.seq_lens.is_cuda:
        return backend.run_unchecked(_paged_attention.group_rows, batch, geometry)
    return _paged_attention.group_rows(batch, geometry)


def paged_attention(
    q: Tensor, pages: KVPages, groups: Groups, *, scale: float, softcap: float | None
) -> Tensor:
    """q [T, Hq, D] attends to its own sequence's pages up to itself -> [T, Hq, D] in q's dtype."""
    if q.is_cuda:
        return backend.run(_attend_by_plan, q, pages, groups, scale=scale, softcap=softcap)
    return _paged_attention.paged_attention(q, pages, groups, scale=scale, softcap=softcap)


@wraps(_paged_attention.paged_attention)  # whose twin is this one's
def _attend_by_plan(q: Tensor, pages: KVPages, groups: Groups, **kwargs: Any) -> Tensor:
    """The meaning, which groups the rows again by itself where they are planned for the kernels."""
    if hasattr(groups, "geometry"):
        groups = _paged_attention.group_rows(groups.batch, groups.geometry)
    return _paged_attention.paged_attention(q, pages, groups, **kwargs)
