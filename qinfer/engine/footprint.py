"""Bytes of weights and KV cache from shapes alone, as plain ints. No torch.

With those of a step (activations.py) they are the terms of the memory ledger (memory.py) and are computed
here and nowhere else: `qinfer plan` adds them up before anything is loaded, the engine puts what it measured
in their place where it has something better. Weights are what the checkpoint writer writes, tensor by tensor,
or what a CPU or a GPU holds of them once loaded; a page of the KV cache is `block_size` tokens of K and V of
all layers.
"""

from __future__ import annotations

import re
from math import prod
from typing import Literal, NamedTuple

from qinfer.checkpoint.names import (
    global_tensors,
    layer_groups,
    layer_modules,
    layer_prefix,
    layer_tensors,
    linear_shape,
)
from qinfer.config import ModelConfig
from qinfer.engine.options import KV_CACHE_DTYPES
from qinfer.errors import UserError

GIB = 1 << 30
_LEAST_BARE = 1 << 20  # a smaller number without a unit was meant in larger units: 4 for 4GiB
Place = Literal["file", "cpu", "gpu"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNITS = {f"{p}{u}": b**i for i, p in enumerate("kmgt", 1) for u, b in (("ib", 1024), ("b", 1000))} | {"b": 1}


def parse_size(text: str | int) -> int:
    """Bytes of '24GiB', '1.5 GB' (powers of 1000) or a plain number of at least 1 MiB, or 0.

    UserError for anything else, a small number without a unit too.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    unit = match and (match[2] or "b")
    if match is None or unit not in _UNITS:
        raise UserError(
            f"{text!r} is not a size: write a number with B, KiB, MiB, GiB or TiB, such as 24GiB", "memory"
        )
    size = int(float(match[1]) * _UNITS[str(unit)])
    if not match[2] and 0 < float(match[1]) < _LEAST_BARE:
        raise UserError(
            f"{text!r} would be {match[1]} bytes: write a unit (B, KiB, MiB, GiB, TiB), such as 24GiB",
            "memory",
        )
    return size


def format_size(num_bytes: int) -> str:
    """'8.46 GiB', '257.1 MiB', '384.0 KiB' or '640 B'."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if abs(num_bytes) >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB" if abs(num_bytes) >= 2**10 else f"{num_bytes} B"


class WeightFormat(NamedTuple):
    """A scheme by name, with what w4a16 needs to know besides."""

    scheme: str = "dense"
    group_size: int = 128
    symmetric: bool = True


DENSE = WeightFormat()


def linear_bytes(weight_format: WeightFormat, out_features: int, in_features: int, item_bytes: int) -> int:
    """Bytes in the file of one linear's weight [N, K], its scales and zero points (compressed-tensors).

    `item_bytes` is the model dtype's, in which scales are stored. UserError for an unknown scheme.
    """
    scheme, group_size, symmetric = weight_format
    words = 4 * out_features  # one int32 per row and per `32 / bits` columns
    shape = 2 * 8  # `weight_shape`: two int64
    match scheme:
        case "dense":
            return out_features * in_features * item_bytes
        case "w8a8-int8" | "w8a8-fp8" | "w8a16-fp8":
            return out_features * (in_features + item_bytes)
        case "w8a8-fp8-static":
            return out_features * in_features + 2 * item_bytes
        case "w8a8-fp8-block":
            return out_features * in_features + -(-out_features // 128) * -(-in_features // 128) * item_bytes
        case "w8a16-int8":
            return words * -(-in_features // 4) + out_features * item_bytes + shape
        case "w4a16":
            groups = -(-in_features // group_size)
            zero_points = 0 if symmetric else 4 * -(-out_features // 8) * groups
            return words * -(-in_features // 8) + out_features * groups * item_bytes + zero_points + shape
    raise UserError(f"no scheme is called {scheme!r}", "scheme")


def cpu_linear_bytes(weight_format: WeightFormat, out_features: int, in_features: int, dtype: str) -> int:
    """Bytes that a CPU holds of a product's weight [N, K], made ready for the ops that read it fastest.

    `dtype` is the activations'. fp8 is widened to a type that multiplies; w4a16 is kept in two layouts, one
    of them only for bfloat16 and N a multiple of 16.
    """
    scheme, group_size, _ = weight_format
    item_bytes, count = ITEM_BYTES[dtype], out_features * in_features
    match scheme:
        case "w8a16-int8":
            return count + out_features * item_bytes
        case "w8a8-int8":
            return count + out_features * 4
        case "w8a8-fp8" | "w8a16-fp8" | "w8a8-fp8-static" | "w8a8-fp8-block":
            scales = {"w8a8-fp8-block": 0, "w8a8-fp8-static": out_features + 1}.get(scheme, out_features)
            return count * (2 if dtype == "bfloat16" else 4) + scales * 4
        case "w4a16":
            scales = out_features * -(-in_features // group_size)
            two_layouts = dtype == "bfloat16" and out_features % 16 == 0
            return count // 2 + scales * (item_bytes + 1) + two_layouts * (count // 2 + scales * 4)
    return linear_bytes(weight_format, out_features, in_features, item_bytes)


def gpu_linear_bytes(weight_format: WeightFormat, out_features: int, in_features: int, dtype: str) -> int:
    """Bytes that a GPU holds of a product's weight [N, K] in its kernels' layouts.

    Eight-bit codes come in panels of 128 columns. w4a16 comes in tiles of 128 x 128, and a group's scale and
    zero point in one word; with float32 activations both stay as plain bytes.
    """
    scheme, group_size, _ = weight_format
    item_bytes, wide = ITEM_BYTES[dtype], -(-in_features // 128) * 128
    match scheme:
        case "w8a8-int8" | "w8a8-fp8" | "w8a16-fp8":
            return out_features * (wide + 4)
        case "w8a8-fp8-static":
            return out_features * (wide + 4) + 4
        case "w8a8-fp8-block":
            return out_features * wide + -(-out_features // 128) * (wide // 128) * 4
        case "w8a16-int8":
            return out_features * (wide + item_bytes)
        case "w4a16" if item_bytes == 2:
            rows = -(-out_features // 128) * 128
            return rows * (wide // 2 + 4 * -(-wide // group_size))
        case "w4a16":
            return out_features * (in_features // 2 + 5 * -(-in_features // group_size))
    return linear_bytes(weight_format, out_features, in_features, item_bytes)


def weight_bytes(
    config: ModelConfig,
    weight_format: WeightFormat = DENSE,
    dtype: str | None = None,
    *,
    place: Place = "file",
) -> int:
    """Bytes of all tensors of this model when the layers' linears have this format.

    Of a checkpoint's files, or of what a CPU or a GPU has loaded. Embeddings, lm_head, norms and biases stay
    in `dtype` (None: the config's).
    """
    dtype = dtype or config.dtype
    item_bytes = ITEM_BYTES[dtype]
    dense = sum(map(prod, global_tensors(config).values()))
    quantized = 0
    for i in range(config.num_layers):
        linears = {f"{layer_prefix(config, i)}{module}.weight" for module in layer_modules(config)}
        dense += sum(prod(shape) for name, shape in layer_tensors(config, i).items() if name not in linears)
        quantized += _layer_linear_bytes(config, weight_format, dtype, place)
    return dense * item_bytes + quantized


def _layer_linear_bytes(config: ModelConfig, weight_format: WeightFormat, dtype: str, place: Place) -> int:
    if place == "file":
        shapes = [linear_shape(config, module) for module in layer_modules(config)]
        return sum(linear_bytes(weight_format, *shape, ITEM_BYTES[dtype]) for shape in shapes)
    loaded = cpu_linear_bytes if place == "cpu" else gpu_linear_bytes
    total = 0
    for group in layer_groups(config):  # linears that share their input are one product
        shapes = [linear_shape(config, module) for module in group.modules]
        total += loaded(weight_format, sum(rows for rows, _ in shapes), shapes[0][1], dtype)
    return total


def kv_bytes_per_token(config: ModelConfig, kv_cache_dtype: str = "auto") -> int:
    """Bytes of K and V of one token over all layers; int8 includes a float32 scale per token and head."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UserError(
            f"kv_cache_dtype {kv_cache_dtype!r}: choose from {', '.join(KV_CACHE_DTYPES)}", "kv_cache_dtype"
        )
    dtype = config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    head_bytes = config.head_dim * ITEM_BYTES.get(dtype, 1) + (4 if dtype == "int8" else 0)
    return config.num_layers * 2 * config.num_kv_heads * head_bytes


def blocks_for(
    num_bytes: int, config: ModelConfig, kv_cache_dtype: str = "auto", block_size: int = 16
) -> int:
    """Whole pages of `block_size` tokens that fit into `num_bytes`."""
    return max(0, num_bytes) // (block_size * kv_bytes_per_token(config, kv_cache_dtype))


class Pages(NamedTuple):
    """One page of the pool: `block_size` tokens in `num_bytes`."""

    block_size: int
    num_bytes: int


def pages_of(config: ModelConfig, kv_cache_dtype: str, block_size: int) -> Pages:
    """A page of this model's cache."""
    return Pages(block_size, block_size * kv_bytes_per_token(config, kv_cache_dtype))
