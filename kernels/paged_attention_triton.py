# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged attention on a GPU: the twin of `paged_attention`, with the same two calls.

`group_rows` plans a step on the device once (`paged_plan_triton`); `paged_attention` then launches, per
layer, the kernel for single rows (`paged_decode_triton`) and, where a step has more rows than sequences, the
one for chunks (`paged_prefill_triton`), which fill different rows of one output. The host knows shapes only:
a step's launches are the same for all lengths, and nothing waits.

Products are in the dtype of q and of plain pages. 8-bit pages are widened in registers: to float16, but V of
int8 to bfloat16, because there the probabilities carry its scales, which may have any size. Sums are float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.kv_unpack_triton import FP8, INT8, PLAIN
from qinfer.kernels.offline import Variant
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.paged_decode_triton import LOG2E, decode_kernel
from qinfer.kernels.paged_plan_triton import UNIT, RowPlan, plan_rows
from qinfer.kernels.paged_prefill_triton import prefill_kernel
from qinfer.kernels.tiles import Declined, gpu_key, tile
from qinfer.kernels.write_kv_triton import kind_of

MAX_GROUP = 16  # query heads of a KV head: the rows of one tensor core tile
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Machine(NamedTuple):
    num_sms: int
    key: str  # of its table of tiles


@cache
def machine_of(device: torch.device) -> Machine:
    """What planning and tables need to know of a device."""
    if device.type != "cuda":
        return Machine(4, "interpreter")
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, gpu_key(properties.name))


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
        _prefill(q, pages, groups, out, shape, numbers)
    return out


class Shape(NamedTuple):
    """What the kernels are compiled for, besides their tiles."""

    group: int  # query heads of a KV head
    dim: int
    page_size: int
    kind: int  # of the pages
    dtype: torch.dtype  # of the queries
    windowed: bool
    capped: bool


def _check(q: Tensor, pages: KVPages, shape: Shape) -> None:
    if shape.group > MAX_GROUP:
        raise Declined(f"{shape.group} query heads share a KV head; the kernel takes up to {MAX_GROUP}")
    if q.dtype not in _TL:
        raise Declined(f"queries are {q.dtype}")
    if shape.kind == PLAIN.value and pages.k.dtype != q.dtype:
        raise Declined(f"queries are {q.dtype} and pages {pages.k.dtype}")
    if shape.dim % 8:
        raise Declined(f"heads have {shape.dim} dimensions, which 8 does not divide")


def _types(kind: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Operand types of q . k and of p @ v."""
    if dtype == torch.float32 or INTERPRETED:  # the interpreter's bfloat16 products are wrong
        return tl.float32, tl.float32
    if kind == FP8.value:
        return tl.float16, tl.float16
    if kind == INT8.value:
        return tl.float16, tl.bfloat16
    return _TL[dtype], _TL[dtype]


def _numbers(
    pages: KVPages, plan: RowPlan, shape: Shape, scale: float, softcap: float | None
) -> tuple[float, float, float, int]:
    """Factor of the logits (to base 2, unless they are capped first), factor of the output, cap, window."""
    base = 1.0 if shape.capped else LOG2E.value
    k_scale, v_scale = (pages.k_scale, pages.v_scale) if shape.kind == FP8.value else (1.0, 1.0)
    return scale * base * k_scale, v_scale, softcap or 1.0, plan.geometry.window or 0


def _op(kernel: str, kind: int) -> str:
    """The name of a kernel's table, "paged_decode_fp8": keys are DIMxITEMSIZE, M counts sequences or rows."""
    names = {PLAIN.value: "plain", INT8.value: "int8", FP8.value: "fp8"}
    return f"paged_{kernel}_{names[kind]}"


def decode_formula(_: int, dim: int, itemsize: int) -> Mapping[str, int]:
    """Tile of the decode kernel where no table has one: few warps, so that several programs share a core."""
    if itemsize == 4:
        return {"TILE": 32, "num_warps": 4, "num_stages": 3}
    if itemsize == 2:
        return {"TILE": 32, "num_warps": 1 if dim <= 128 else 4, "num_stages": 4}
    return {"TILE": 64 if dim <= 128 else 32, "num_warps": 2 if dim <= 128 else 4, "num_stages": 3}


def prefill_formula(_: int, dim: int, itemsize: int) -> Mapping[str, int]:
    """Tile of the prefill kernel where no table has one; `per_sm` programs per multiprocessor."""
    if itemsize == 4:
        return {"BLOCK": 64, "TILE": 32, "num_warps": 4, "num_stages": 2, "per_sm": 1}
    if dim > 128:
        tokens = 32 if itemsize == 2 else 64
        return {"BLOCK": 64, "TILE": tokens, "num_warps": 8, "num_stages": 2, "per_sm": 1}
    return {"BLOCK": 128, "TILE": 64, "num_warps": 8, "num_stages": 3, "per_sm": 1}


def _decode(
    q: Tensor,
    pages: KVPages,
    plan: RowPlan,
    out: Tensor,
    shape: Shape,
    numbers: tuple[float, float, float, int],
) -> None:
    num_kv_heads, bound = pages.k.shape[1], len(plan.items)
    key, num_seqs = machine_of(q.device).key, len(plan.batch.seq_lens)
    entry = tile(_op("decode", shape.kind), key, decode_formula, num_seqs, shape.dim, pages.k.itemsize)
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
        **constants,
    )


def decode_constants(entry: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """What the decode kernel is compiled for; `entry` is its tile."""
    qk_type, pv_type = _types(shape.kind, shape.dtype)
    rows = triton.next_power_of_2(shape.group)
    return {
        "GROUP": shape.group,
        "ROWS": rows,
        "DIM": shape.dim,
        "LANES": max(16, triton.next_power_of_2(shape.dim // (1 if shape.kind == PLAIN.value else 2))),
        "PAGE": shape.page_size,
        "UNIT": UNIT,
        "KIND": shape.kind,
        "QK_TYPE": qk_type,
        "PV_TYPE": pv_type,
        "WINDOW": shape.windowed,
        "CAP": shape.capped,
        "ASM": not INTERPRETED,
        "BIASED": shape.kind == INT8.value and not INTERPRETED and shape.dtype != torch.float32,
        "MERGE": max(1, 32 // rows),
        **entry,
    }


def _prefill(
    q: Tensor,
    pages: KVPages,
    plan: RowPlan,
    out: Tensor,
    shape: Shape,
    numbers: tuple[float, float, float, int],
) -> None:
    num_kv_heads, num_seqs = pages.k.shape[1], len(plan.batch.seq_lens)
    machine = machine_of(q.device)
    op, itemsize = _op("prefill", shape.kind), pages.k.itemsize
    entry = dict(tile(op, machine.key, prefill_formula, len(q), shape.dim, itemsize))
    block_rows = entry["BLOCK"] // shape.group
    blocks = (len(q) + num_seqs * (block_rows - 1)) // block_rows
    programs = min(blocks * num_kv_heads, machine.num_sms * entry.pop("per_sm"))
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
        **prefill_constants(entry, shape),
    )


def prefill_constants(entry: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """What the prefill kernel is compiled for; `entry` is its tile."""
    qk_type, pv_type = _types(shape.kind, shape.dtype)
    if shape.kind == INT8.value:  # it casts, and int8 becomes float16 by the slow unit, but not bfloat16
        qk_type = pv_type
    # one page id and two scales per token are too much for the registers of a larger tile
    spills = shape.kind == INT8.value and shape.page_size % entry["TILE"] != 0
    return {
        "GROUP": shape.group,
        "DIM": shape.dim,
        "LANES": triton.next_power_of_2(shape.dim),
        "PAGE": shape.page_size,
        "KIND": shape.kind,
        "QK_TYPE": qk_type,
        "PV_TYPE": pv_type,
        "WINDOW": shape.windowed,
        "CAP": shape.capped,
        **entry,
        "TILE": 32 if spills else entry["TILE"],
    }


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
            entry = tile(_op("decode", kind), "nvidia-h200", decode_formula, 64, dim, itemsize)
            words = element if kind == PLAIN.value else "*i16"
            yield _variant(decode_kernel, decode_constants(entry, shape), shape, words)
            entry = dict(tile(_op("prefill", kind), "nvidia-h200", prefill_formula, 4096, dim, itemsize))
            del entry["per_sm"]
            yield _variant(prefill_kernel, prefill_constants(entry, shape), shape, element)


def _variant(kernel: Any, constants: Mapping[str, Any], shape: Shape, element: str) -> Variant:
    types = {
        "*i64": ("table", "seq_lens", "query_starts"),
        "*i32": ("header", "items", "counters", "prefill"),
        "*fp32": ("k_scales", "v_scales", "sums", "stats"),
        "i32": ("q_stride", "table_stride", "num_kv_heads", "num_seqs", "num_rows", "window"),
        "fp32": ("qk_scale", "v_scale", "softcap"),
    }
    options = {key: constants[key] for key in ("num_warps", "num_stages")}
    fixed = {key: value for key, value in constants.items() if key not in options}
    if shape.kind != INT8.value:
        fixed |= {"k_scales": None, "v_scales": None}
    by_name = {name: kind for kind, names in types.items() for name in names}
    by_name |= {"q": "*bf16", "out": "*bf16", "k": element, "v": element}
    signature = {name: by_name[name] for name in kernel.arg_names if name not in fixed}
    label = f"{kernel.fn.__name__} {element} {shape.group}x{shape.dim} page {shape.page_size}"
    return Variant(label, kernel, signature, fixed, options, ("q_stride",), wants_tensor_cores=True)
