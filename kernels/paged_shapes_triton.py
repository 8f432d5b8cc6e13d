# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the kernels of paged attention are compiled for: shapes, types of operands, tiles.

Products are in the dtype of q and of plain pages. 8-bit pages are widened in registers: to float16, but V of
int8 to bfloat16, because there the probabilities carry its scales, which may have any size. Sums are float32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from qinfer.kernels.kv_unpack_triton import FP8, INT8, PLAIN
from qinfer.kernels.paged_plan_triton import UNIT
from qinfer.kernels.tiles import gpu_key

WARPS_BLOCK, WARPS_TILE, WARPS_STAGES = 128, 64, 3  # rows and tokens of `prefill_by_warps`, buffers of each
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Machine(NamedTuple):
    num_sms: int
    key: str  # of its table of tiles
    capability: int  # its major number, 9 for Hopper


@cache
def machine_of(device: torch.device) -> Machine:
    """What planning and tables need to know of a device."""
    if device.type != "cuda":
        return Machine(4, "interpreter", 0)
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, gpu_key(properties.name), properties.major)


class Shape(NamedTuple):
    """What the kernels are compiled for, besides their tiles."""

    group: int  # query heads of a KV head
    dim: int
    page_size: int
    kind: int  # of the pages
    dtype: torch.dtype  # of the queries
    windowed: bool
    capped: bool


def _types(kind: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Operand types of q . k and of p @ v."""
    if dtype == torch.float32 or INTERPRETED:  # the interpreter's bfloat16 products are wrong
        return tl.float32, tl.float32
    if kind == FP8.value:
        return tl.float16, tl.float16
    if kind == INT8.value:
        return tl.float16, tl.bfloat16
    return TYPES[dtype], TYPES[dtype]


def table_name(kernel: str, kind: int) -> str:
    """Of a kernel's tiles, "paged_decode_fp8": keys are DIMxITEMSIZE, M rows (times KV heads for decode)."""
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
    if dim > 128:  # what widens 8-bit pages as well would spill with 64 rows
        rows = 64 if itemsize == 2 else 32
        return {"BLOCK": rows, "TILE": 32, "num_warps": 8, "num_stages": 2, "per_sm": 1}
    return {"BLOCK": 128, "TILE": 64, "num_warps": 8, "num_stages": 3, "per_sm": 1}


def decode_constants(entry: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """What the decode kernel is compiled for; `entry` is its tile."""
    qk_type, pv_type = _types(shape.kind, shape.dtype)
    rows = triton.next_power_of_2(shape.group)
    spills = shape.kind == INT8.value and shape.page_size % entry["TILE"] != 0  # as below
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
        "MERGE": max(1, 32 // rows),
        "EARLY": not INTERPRETED,
        "launch_pdl": not INTERPRETED,
        **entry,
        "TILE": min(entry["TILE"], 32) if spills else entry["TILE"],
    }


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


def by_warps_takes(shape: Shape) -> bool:
    """Whether `prefill_by_warps` does these shapes, on Hopper; 8-bit pages once they are widened."""
    return (
        shape.dtype in (torch.bfloat16, torch.float16)
        and shape.dim in (64, 128)
        and shape.page_size % WARPS_TILE == 0
        and not (shape.windowed or shape.capped)
    )


def warps_constants(shape: Shape) -> dict[str, Any]:
    """What `prefill_by_warps` is compiled for."""
    return {"GROUP": shape.group, "PAGE": shape.page_size, "STAGES": WARPS_STAGES, "num_warps": 4}
