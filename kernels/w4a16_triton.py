# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Product with 4-bit weights on a GPU: the twin of `w4a16_fragments`.

A table says, by tokens and the weight's shape, which tile the kernel takes (w4a16_plan.py), or that the
weight is unpacked and torch.mm multiplies, which is faster for many tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qinfer.kernels.offline import Variant
from qinfer.kernels.pieces_triton import add_up, adding_variant, workspace
from qinfer.kernels.rows_triton import MEASURED, table_of
from qinfer.kernels.split_k_triton import num_multiprocessors
from qinfer.kernels.tiles import Declined, Tile, tile
from qinfer.kernels.w4a16 import INPUTS, ROWS
from qinfer.kernels.w4a16_plan import formula, plan
from qinfer.kernels.w4a16_product_triton import product
from qinfer.kernels.w4a16_quarters_triton import launch_by_quarters, variant_by_quarters
from qinfer.kernels.w4a16_unpack_triton import dequantize_kernel
from qinfer.kernels.w4a16_warps_triton import by_warps
from qinfer.kernels.warps_triton import (
    descriptor,
    descriptor_type,
    flat_descriptor,
    flat_descriptor_type,
)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # on the CPU; bfloat16 is computed in float32 there
TRITON_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def w4a16_fragments(x: Tensor, words: Tensor, scale_zero: Tensor) -> Tensor:
    """The twin of the meaning of that name; for one stream of a device at a time."""
    return _multiply(x, words, scale_zero, in_parts=False)


def w4a16_parts(x: Tensor, words: Tensor, scale_zero: Tensor) -> Tensor:
    """float32 [S, T, N], for the next kernel to add up over S, where the tile cuts K evenly; else [T, N]."""
    return _multiply(x, words, scale_zero, in_parts=True)


def _multiply(x: Tensor, words: Tensor, scale_zero: Tensor, in_parts: bool) -> Tensor:
    (m, k), n = x.shape, scale_zero.shape[1]
    group = _group(k, words, scale_zero)
    if x.dtype not in TRITON_DTYPE or k % 8:
        raise Declined(f"x must be bfloat16 or float16 with K a multiple of 8, not {x.dtype} with K = {k}")
    if not (m and n):
        return x.new_empty(m, n)
    choose = partial(formula, cores=num_multiprocessors(x.device))
    config = tile("w4a16", table_of(x.device), choose, m, n, k, in_parts=in_parts)
    if ("BY_WARPS" in config and group % INPUTS) or ("QUARTERS" in config and group != INPUTS):
        config = choose(m, n, k)
    if "DEQUANTIZE" in config:
        return torch.mm(x, dequantize(words, scale_zero, k, x.dtype).T)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous().clone()  # rows that 16-byte copies can start at
    in_parts = in_parts and "QUARTERS" not in config
    parts = plan(config, m, n, k).equal_parts(n) if in_parts else 0
    if parts:
        out = torch.empty(parts, m, n, device=x.device)
        launch(config, group, x, words, scale_zero, out)
        return out
    out = torch.empty(m, n, dtype=torch.float32 if INTERPRET else x.dtype, device=x.device)
    launch(config, group, x, words, scale_zero, out)
    return out.to(x.dtype)


def dequantize(words: Tensor, scale_zero: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] rounded to `dtype`, the scales', of what `pack_fragments` made; K = inputs."""
    n, tiles = scale_zero.shape[1], words.shape[1]
    group = _group(inputs, words, scale_zero)
    out = torch.empty(n, inputs, dtype=torch.float32 if INTERPRET else dtype, device=words.device)
    scale = TRITON_DTYPE[dtype]
    dequantize_kernel[(triton.cdiv(n, ROWS) * tiles,)](
        words, scale_zero, out, n, inputs, tiles, scale_zero.stride(0), GROUP=group, SCALE=scale,
        COMPUTE=tl.float32 if INTERPRET else scale, ASM=not INTERPRET, ROWS=ROWS,
    )  # fmt: skip
    return out.to(dtype)


def launch(config: Tile, group: int, x: Tensor, words: Tensor, scale_zero: Tensor, out: Tensor) -> None:
    """Writes the product into out [T, N], by the tile that a row of the table names.

    Or its parts, of which out is [S, T, N] float32.
    """
    if "QUARTERS" in config:
        return launch_by_quarters(config, x, words, scale_zero, out)
    (m, k), n, dtype = x.shape, out.shape[-1], x.dtype
    x = x.float() if INTERPRET and dtype is torch.bfloat16 else x
    how = plan(config, m, n, k)
    tile_shape, in_parts = (config["BM"], how.rows), out.dim() == 3
    parts = out if in_parts else workspace(how.cut, how.rows * config["BM"], x.device)
    num_parts = len(out) if in_parts else 0
    if "BY_WARPS" in config:
        by_warps[(how.cut.programs,)](
            descriptor(x, [config["BM"], INPUTS]), flat_descriptor(words.view(-1, 256), _words_block(config)),
            flat_descriptor(_lines(scale_zero, words), [1, how.rows]), out, parts, m, n, words.shape[1],
            how.blocks, *how.cut, **warps_constants(config, how.rows, group, num_parts),
            **warps_options(config),
        )  # fmt: skip
    else:
        tokens = TensorDescriptor.from_tensor(x, [config["BM"], INPUTS]) if config["TMA"] else x
        product[(how.cut.programs,)](
            tokens, words, scale_zero, out, parts, m, n, k, x.stride(0), scale_zero.stride(0), words.shape[1],
            how.blocks, *how.cut, config["AHEAD"], config["EARLY"],
            **constants(config, how.rows, group, k, dtype), PARTS=num_parts, **options(config, group),
        )  # fmt: skip
    if how.cut.pieces and not in_parts:
        add_up(parts, None, out, how.cut, how.steps, how.blocks, tile_shape)


def options(config: Tile, group: int) -> dict[str, Any]:
    """The compiler's and launcher's options; small groups have several scales a row, and need registers."""
    return {
        "num_warps": config["WARPS"],
        "num_stages": config["STAGES"],
        "launch_pdl": not INTERPRET,
        "maxnreg": config["REGISTERS"] or None if group >= INPUTS else None,
    }


def constants(config: Tile, rows: int, group: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constants of `product`. Groups of less than a tile have their scales in the weight (MODE 0)."""
    scale = TRITON_DTYPE[dtype]
    return {
        "BM": config["BM"],
        "BN": rows,
        "MODE": config["MODE"] if group >= INPUTS else 0,
        "PAIRS_FIRST": config["BM"] == 8 or config["WARPS"] < 4,
        "UNROLL": config["UNROLL"],
        "GROUP": group,
        "EVEN": k % (INPUTS * config["UNROLL"]) == 0,
        "TMA": config["TMA"],
        "STAGES": config["STAGES"],
        "SCALE": scale,
        "COMPUTE": tl.float32 if INTERPRET and dtype is torch.bfloat16 else scale,
        "ASM": not INTERPRET,
    }


def warps_constants(config: Tile, rows: int, group: int, parts: int) -> dict[str, Any]:
    """The constants of `by_warps`."""
    registers = 112 if rows == 256 else 104 if config["BM"] < 128 else 160
    named = {name: config[name] for name in ("BM", "STAGES", "UNROLL", "MODE", "EARLY")}
    return {**named, "BN": rows, "GROUP": group, "PARTS": parts, "REGISTERS": registers}


def warps_options(config: Tile) -> dict[str, Any]:
    """Two programs of 128 rows fit on a multiprocessor where they leave each other registers."""
    two = config["BN"] == 128 and config["BM"] < 128
    return {"num_warps": 4, "launch_pdl": True, "maxnreg": 80 if two else None}


def _lines(scale_zero: Tensor, words: Tensor) -> Tensor:
    """The same with a stride that means something, where there is only one line."""
    if scale_zero.shape[0] > 1:
        return scale_zero
    return scale_zero.as_strided(scale_zero.shape, (words.shape[0] * ROWS, 1))


def _words_block(config: Tile) -> list[int]:
    return [4 * config["UNROLL"], 256]


def _group(k: int, words: Tensor, scale_zero: Tensor) -> int:
    """The group size; Declined for one that tiles do not fit, and for a `scale_zero` without its padding."""
    group = k // scale_zero.shape[0]
    if group % INPUTS and group not in (32, 64) and scale_zero.shape[0] > 1:
        raise Declined(f"groups of {group}; tiles of {INPUTS} inputs need 32, 64 or a multiple of {INPUTS}")
    rows, held = words.shape[0] * ROWS, scale_zero.untyped_storage().nbytes() // 4
    lines = scale_zero.shape[0] == 1 or scale_zero.stride(0) == rows  # one line's stride says nothing
    if not lines or held - scale_zero.storage_offset() < rows or scale_zero.data_ptr() % 16:
        raise Declined("scale_zero was copied and has lost its padding; pack_fragments makes it")
    return group if scale_zero.shape[0] > 1 else triton.cdiv(k, INPUTS) * INPUTS


def offline_variants() -> Iterator[Variant]:
    """The tables' tiles for Llama-8B's weights and the formula's, in both dtypes; other groups at a few."""
    choose = partial(formula, cores=132)
    found: dict[str, Variant] = {}
    for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (4864, 896)):
        for m in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
            config = tile("w4a16", MEASURED, choose, m, n, k, in_parts=m == 1)
            found |= {variant.name: variant for variant in _variants(config, m, n, k)}
    yield from found.values()


def _variants(config: Tile, m: int, n: int, k: int) -> Iterator[Variant]:
    """Of the kernels that a row of the table means for a size."""
    if "QUARTERS" in config:
        yield from (variant_by_quarters(config, element) for element in ("bf16", "fp16"))
    elif "DEQUANTIZE" not in config:
        how = plan(config, m, n, k)
        kinds = [(128, torch.bfloat16, 0), (128, torch.float16, 0)]
        if "BY_WARPS" not in config:  # smaller groups have the formula's tile instead
            kinds.append((64, torch.bfloat16, 0))
        if parts := how.equal_parts(n):
            kinds.append((128, torch.bfloat16, parts))
        for group, dtype, count in kinds:
            yield _variant(config, how.rows, group, k, dtype, count)
        yield adding_variant((config["BM"], how.rows), "bf16")


def _variant(config: Tile, rows: int, group: int, k: int, dtype: torch.dtype, parts: int) -> Variant:
    element = "bf16" if dtype is torch.bfloat16 else "fp16"
    types = {"words": "*i32", "scale_zero": "*i32", "parts": "*fp32"}
    types["x"] = types["out"] = f"*{element}"
    kernel: Any = product
    if "BY_WARPS" in config:
        kernel = by_warps
        fixed, chosen = warps_constants(config, rows, group, parts), warps_options(config)
        types["x"] = descriptor_type(element, [config["BM"], INPUTS])
        types["words"] = flat_descriptor_type("i32", _words_block(config))
        types["scale_zero"] = flat_descriptor_type("i32", [1, rows])
    else:
        fixed, chosen = {**constants(config, rows, group, k, dtype), "PARTS": parts}, options(config, group)
        if config["TMA"]:
            types["x"] = f"tensordesc<{element}[{config['BM']},{INPUTS}]>"
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in fixed}
    label = " ".join(f"{key}={value}" for key, value in {**fixed, **chosen}.items())
    aligned = tuple(name for name in ("N", "K", "x_stride", "scale_stride") if name in signature)
    return Variant(f"w4a16 {label}", kernel, signature, fixed, chosen, aligned, wants_tensor_cores=True)
