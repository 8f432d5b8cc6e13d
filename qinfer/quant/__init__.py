"""Numeric formats of linear layers: which exist, by which name, and how a checkpoint spells them.

A scheme is a small frozen class (scheme.py) and has a file of its own. What a checkpoint's
`quantization_config` says about a group of layers is compared with what each scheme would write; whatever
is equal to none of them is refused by name before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qinfer.errors import CheckpointError, UnsupportedModelError, UserError
from qinfer.quant.dense import Dense
from qinfer.quant.rounding import Ranges
from qinfer.quant.scheme import ActivationFormat, Scheme, TensorSpec
from qinfer.quant.w4a16 import GROUP_SIZES, W4A16
from qinfer.quant.w4a16_ordered import W4A16Ordered
from qinfer.quant.w8a8_fp8 import W8A8Fp8
from qinfer.quant.w8a8_fp8_block import W8A8Fp8Block
from qinfer.quant.w8a8_fp8_static import W8A8Fp8Static
from qinfer.quant.w8a8_int8 import W8A8Int8
from qinfer.quant.w8a16_fp8 import W8A16Fp8
from qinfer.quant.w8a16_int8 import W8A16Int8

__all__ = [
    "FORMAT",
    "GROUP_SIZES",
    "SCHEMES",
    "W4A16",
    "ActivationFormat",
    "Dense",
    "Ranges",
    "Scheme",
    "TensorSpec",
    "W4A16Ordered",
    "W8A8Fp8",
    "W8A8Fp8Block",
    "W8A8Fp8Static",
    "W8A8Int8",
    "W8A16Fp8",
    "W8A16Int8",
    "quantize_named",
    "scheme_by_name",
    "scheme_from_group",
    "settle_group_size",
]

_EIGHT_BIT: tuple[Callable[[], Scheme], ...] = (
    W8A8Int8,
    W8A16Int8,
    W8A8Fp8,
    W8A8Fp8Static,
    W8A8Fp8Block,
    W8A16Fp8,
)
SCHEMES: dict[str, Callable[[], Scheme]] = {made().name: made for made in (Dense, *_EIGHT_BIT, W4A16)}

# compressed-tensors' `format` of each scheme, by name
FORMAT: dict[str, str] = {
    "dense": "dense",
    "w8a8-int8": "int-quantized",
    "w8a16-int8": "pack-quantized",
    "w8a8-fp8": "float-quantized",
    "w8a8-fp8-static": "float-quantized",
    "w8a8-fp8-block": "float-quantized",
    "w8a16-fp8": "naive-quantized",
    "w4a16": "pack-quantized",
}

_ARGUMENT_DEFAULTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": None,
    "group_size": None,
    "dynamic": False,
}


def scheme_by_name(name: str, *, group_size: int | None = None, symmetric: bool | None = None) -> Scheme:
    """The scheme of that name; `group_size` (default 128) and `symmetric` (default False) are w4a16's.

    Raises UserError for an unknown name, naming the known, and for an option that the scheme does not have.
    """
    if name not in SCHEMES:
        raise UserError(f"unknown scheme {name!r}; choose one of {', '.join(SCHEMES)}", "scheme")
    if name == W4A16.name:
        return W4A16(128 if group_size is None else group_size, bool(symmetric))
    for option, value in (("group_size", group_size), ("symmetric", symmetric)):
        if value is not None:
            raise UserError(f"scheme {name} has no {option} to choose (got {value}); only w4a16 has", option)
    return SCHEMES[name]()


def scheme_from_group(group: Mapping[str, Any], fmt: str) -> Scheme:
    """The scheme that one entry of `config_groups`, stored in format `fmt`, describes.

    Raises UnsupportedModelError, naming what was found and what is supported, for everything else.
    """
    weights = _arguments(group.get("weights"))
    found = {"weights": weights, "input_activations": _arguments(group.get("input_activations"))}
    four_bit = [
        kind(size, symmetric)
        for kind in (W4A16, W4A16Ordered)
        for size in GROUP_SIZES
        for symmetric in (True, False)
    ]
    known: list[Scheme] = [*(made() for made in _EIGHT_BIT), *four_bit]
    for scheme in known:
        if found == scheme.group() and fmt == FORMAT[scheme.name] and not group.get("output_activations"):
            return scheme
    raise UnsupportedModelError(
        f"quantized weights of format {fmt!r} with weights {group.get('weights')}, input_activations "
        f"{group.get('input_activations')}, output_activations {group.get('output_activations')} are not "
        f"supported; supported are {_supported()}"
    )


def settle_group_size(widths: Mapping[str, int], wanted: int) -> int:
    """The largest of 128, 64, 32 that is at most `wanted` and divides the input width of every layer.

    `widths` maps a layer's name to its in_features. One size holds for the whole model. Raises UserError
    naming the layers that none divides, or when `wanted` itself is not a known size.
    """
    if wanted not in GROUP_SIZES:
        raise UserError(f"group size {wanted} is not supported; choose 128, 64 or 32", "group_size")
    for size in GROUP_SIZES:
        if size <= wanted and all(width % size == 0 for width in widths.values()):
            return size
    bad = [f"{name} ({width})" for name, width in widths.items() if width % GROUP_SIZES[-1]]
    raise UserError(
        f"no group size of 128, 64 or 32 up to {wanted} divides the input width of {', '.join(bad)}; "
        "choose a scheme without groups (w8a8-int8, w8a16-int8, w8a8-fp8, w8a16-fp8)",
        "group_size",
    )


def quantize_named(
    scheme: Scheme, name: str, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """`scheme.quantize`, whose errors begin with the tensor's name."""
    try:
        return scheme.quantize(weight, ranges, dtype=dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    except UserError as error:
        raise UserError(f"{name}: {error}", error.parameter) from error


def _arguments(raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """QuantizationArgs with their defaults filled in, reduced to what decides the layout and the meaning."""
    if raw is None:
        return None
    arguments = {key: raw.get(key, default) for key, default in _ARGUMENT_DEFAULTS.items()}
    if arguments["group_size"] == -1:  # the old spelling of one scale per channel
        arguments |= {"group_size": None, "strategy": "channel"}
    if raw.get("block_structure"):
        arguments["block_structure"] = _block_shape(raw["block_structure"])
    if arguments["strategy"] is None:
        arguments["strategy"] = "tensor" if arguments["group_size"] is None else "group"
    actorder = raw.get("actorder")
    if actorder not in (None, False, "weight", "static"):  # weight_g_idx permutes the groups
        arguments["actorder"] = "group" if actorder in (True, "dynamic") else actorder
    return arguments


def _block_shape(raw: Any) -> list[int]:
    """[128, 128], which old files spell "128x128"."""
    return [int(part) for part in (raw.split("x") if isinstance(raw, str) else raw)]


def _supported() -> str:
    """The formats of the table above, in words."""
    return (
        "int-quantized int8 per channel with int8 per token; pack-quantized int8 per channel; pack-quantized "
        "int4 in groups of 128, 64 or 32; float-quantized fp8 per channel with fp8 per token, per tensor "
        "with static fp8, per 128x128 block with fp8 per token and 128; naive-quantized fp8 per channel"
    )
