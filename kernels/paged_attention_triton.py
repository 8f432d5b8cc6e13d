# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged attention on a GPU: the twin of `paged_attention`, with the same two calls.

`group_rows` plans a step on the device once (`paged_plan_triton`); `paged_attention` then launches, per
layer, the kernel for single rows (`paged_decode_triton`) and, where a step has more rows than sequences, what
chunks need (`paged_chunks_triton`), which fill different rows of one output. The host knows shapes only: a
step's launches are the same for all lengths, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.kv_unpack_triton import FP8, INT8, PLAIN
from qinfer.kernels.offline import Variant
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.paged_chunks_triton import Call, Numbers, attend_chunks
from qinfer.kernels.paged_decode_triton import decode_kernel
from qinfer.kernels.paged_plan_triton import RowPlan, plan_rows
from qinfer.kernels.paged_prefill_triton import prefill_kernel
from qinfer.kernels.paged_prefill_warps_triton import prefill_by_warps
from qinfer.kernels.paged_shapes_triton import (
    TYPES,
    WARPS_TILE,
    Shape,
    decode_constants,
    decode_formula,
    machine_of,
    prefill_constants,
    prefill_formula,
    table_name,
    warps_constants,
)
from qinfer.kernels.paged_walk_triton import LOG2E
from qinfer.kernels.paged_widen_triton import widen_constants, widen_pages
from qinfer.kernels.rows_triton import MEASURED
from qinfer.kernels.tiles import Declined, each_row, tile
from qinfer.kernels.warps_triton import descriptor_type
from qinfer.kernels.write_kv_triton import kind_of

OPTIONS = ("num_warps", "num_stages", "launch_pdl")  # of a launch, not of a kernel
FEW = 528  # programs that leave the memory idle while they wait: four for each multiprocessor of an H200
MAX_GROUP = 16  # query heads of a KV head: the rows of one tensor core tile


def group_rows(batch: PagedBatch, geometry: Geometry) -> RowPlan:
    """Plans a step's attention on its device, for all layers of equal geometry."""
    return plan_rows(batch, geometry, machine_of(batch.seq_lens.device).num_sms)


def paged_attention(
    q: Tensor, pages: KVPages, groups: RowPlan, *, scale: float, softcap: float | None = None
) -> Tensor:
    """q [T, Hq, D] over the pages of the planned step -> [T, Hq, D] in q's dtype, as its meaning says.

    Declines more than 16 query heads per KV head, and plain pages of another dtype than q's.
    """
    num_kv_heads, page_size, dim = pages.k.shape[1:]
    shape = Shape(
        q.shape[1] // num_kv_heads,
        dim,
        page_size,
        kind_of(pages.k.dtype),
        q.dtype,
        groups.geometry.window is not None,
        softcap is not None,
    )
    _check(q, pages, shape)
    if q.stride(-1) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    numbers = _numbers(pages, groups, shape, scale, softcap)
    _decode(q, pages, groups, out, shape, numbers)
    if len(q) > len(groups.batch.seq_lens):
        attend_chunks(Call(q, groups, out, shape, numbers), pages)
    return out


def _check(q: Tensor, pages: KVPages, shape: Shape) -> None:
    if shape.group > MAX_GROUP:
        raise Declined(f"{shape.group} query heads share a KV head; the kernel takes up to {MAX_GROUP}")
    if q.dtype not in TYPES:
        raise Declined(f"queries are {q.dtype}")
    if shape.kind == PLAIN.value and pages.k.dtype != q.dtype:
        raise Declined(f"queries are {q.dtype} and pages {pages.k.dtype}")
    if shape.dim % 8:
        raise Declined(f"heads have {shape.dim} dimensions, which 8 does not divide")


def _numbers(pages: KVPages, plan: RowPlan, shape: Shape, scale: float, softcap: float | None) -> Numbers:
    """Factor of the logits (to base 2, unless they are capped first), factor of the output, cap, window."""
    base = 1.0 if shape.capped else LOG2E.value
    k_scale, v_scale = (pages.k_scale, pages.v_scale) if shape.kind == FP8.value else (1.0, 1.0)
    return scale * base * k_scale, v_scale, softcap or 1.0, plan.geometry.window or 0


def _decode(q: Tensor, pages: KVPages, plan: RowPlan, out: Tensor, shape: Shape, numbers: Numbers) -> None:
    num_kv_heads, bound = pages.k.shape[1], len(plan.items)
    machine = machine_of(q.device)
    op, itemsize = table_name("decode", shape.kind), pages.k.itemsize
    programs = len(plan.batch.seq_lens) * num_kv_heads
    entry = tile(op, machine.key, decode_formula, programs, shape.dim, itemsize)
    constants = decode_constants(entry, shape)
    lanes = constants["LANES"] * (1 if shape.kind == PLAIN.value else 2)
    sums = torch.empty(bound * num_kv_heads, constants["ROWS"], lanes, dtype=torch.float32, device=q.device)
    stats = torch.empty(bound * num_kv_heads, 2, constants["ROWS"], dtype=torch.float32, device=q.device)
    k, v = pages.k, pages.v
    if shape.kind != PLAIN.value:  # as words of two numbers
        k, v = k.view(torch.int16), v.view(torch.int16)
    decode_kernel[(num_kv_heads, bound)](
        q,
        k,
        v,
        pages.k_scales,
        pages.v_scales,
        plan.batch.page_table,
        plan.header,
        plan.items,
        plan.counters,
        out,
        sums,
        stats,
        q.stride(0),
        len(q),
        plan.batch.page_table.stride(0),
        num_kv_heads,
        *numbers,
        (2 if programs <= FEW else 1) if plan.read else 0,
        **constants,
    )
    plan.read.append(True)


def offline_variants() -> Iterator[Variant]:
    """Both kernels for every kind of page, at head dimensions and options that models have."""
    for group, dim, page_size, windowed, capped in (
        (4, 128, 64, False, False),
        (7, 64, 64, False, False),
        (4, 128, 16, False, False),
        (2, 256, 64, True, True),
        (1, 96, 64, True, False),
    ):
        for kind, element in ((PLAIN.value, "*bf16"), (FP8.value, "*fp8e4nv"), (INT8.value, "*i8")):
            shape = Shape(group, dim, page_size, kind, torch.bfloat16, windowed, capped)
            itemsize = 2 if kind == PLAIN.value else 1
            op, words = table_name("decode", kind), element if kind == PLAIN.value else "*i16"
            programs = {8, 64, 1024, 4096, *each_row(op, MEASURED, f"{dim}x{itemsize}")}
            entries = [tile(op, MEASURED, decode_formula, m, dim, itemsize) for m in sorted(programs)]
            for i, entry in enumerate(entries):
                if entry not in entries[:i]:
                    yield _variant(decode_kernel, decode_constants(entry, shape), shape, words)
            op = table_name("prefill", kind)
            entry = dict(tile(op, MEASURED, prefill_formula, 4096, dim, itemsize))
            del entry["per_sm"]
            yield _variant(prefill_kernel, prefill_constants(entry, shape), shape, element)
    for group, dim in ((4, 128), (7, 64)):
        shape = Shape(group, dim, 64, PLAIN.value, torch.bfloat16, False, False)
        element = descriptor_type("bf16", [WARPS_TILE, dim])
        yield _variant(prefill_by_warps, warps_constants(shape), shape, element)
        for kind, element in ((FP8.value, "*fp8e4nv"), (INT8.value, "*i8")):
            shape = Shape(group, dim, 64, kind, torch.bfloat16, False, False)
            yield _variant(widen_pages, widen_constants(dim, 64), shape, element)


def _variant(kernel: Any, constants: Mapping[str, Any], shape: Shape, element: str) -> Variant:
    types = {
        "*i64": ("table", "wide_table", "seq_lens", "query_starts"),
        "*i32": ("header", "items", "counters", "prefill"),
        "*fp32": ("k_scales", "v_scales", "sums", "stats"),
        "i32": ("q_stride", "table_stride", "wide_stride", "num_kv_heads", "num_seqs", "num_rows"),
        "fp32": ("qk_scale", "v_scale", "softcap"),
    }
    options = {key: constants[key] for key in OPTIONS if key in constants}
    fixed = {key: value for key, value in constants.items() if key not in options}
    if shape.kind != INT8.value:
        fixed |= {name: None for name in ("k_scales", "v_scales") if name in kernel.arg_names}
    by_name = {name: kind for kind, names in types.items() for name in names}
    by_name |= dict.fromkeys(("q", "out", "wide_k", "wide_v"), "*bf16")
    by_name |= dict.fromkeys(("window", "most_pages", "head_start"), "i32")
    by_name |= {"k": element, "v": element}
    signature = {name: by_name[name] for name in kernel.arg_names if name not in fixed}
    label = f"{table_name(kernel.fn.__name__, shape.kind)} {shape.group}x{shape.dim} page {shape.page_size}"
    label += f" tile {constants['TILE']}" if "TILE" in constants else ""
    aligned = ("q_stride",) if "q" in signature else ()
    return Variant(label, kernel, signature, fixed, options, aligned, wants_tensor_cores="q" in signature)
