"""GPTQ's dialect: checkpoints of AutoGPTQ, GPTQModel and what reads and writes as they do.

A linear [N, K] of b bits is, in the file,

    qweight  int32 [K * b / 32, N]   codes of an output go down a column, low bits first
    qzeros   int32 [G, N * b / 32]   zero points of a group go along a row
    scales   float16 [G, N]
    g_idx    int32 [K]               group of each input; absent: k // group_size

Version 1 (`checkpoint_format: gptq`, or no word of it) stores a zero point less one, and readers add one and
drop the carry; version 2 (`gptq_v2`) stores it as it is. A symmetric zero point is 2^(b-1), so it is 7 in
every field of a 4-bit file of version 1, and 8 in one of version 2. `desc_act` (act-order) is not needed to
read a file: what it did to the groups is what g_idx says. `dynamic` gives single linears other settings by
regular expressions, `+:` or nothing before one that changes, `-:` before one that leaves alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qinfer.checkpoint.grouped_ints import GroupedInts, file_tensors, scheme_for, size_of_group
from qinfer.checkpoint.stored import Folder, Stored
from qinfer.checkpoint.words import fields, words
from qinfer.errors import CheckpointError, UnsupportedModelError, UserError
from qinfer.quant import W4A16, Dense, Scheme, TensorSpec, W4A16Ordered, W8A16Int8
from qinfer.quant.packing import unpack, unpack_zero_points

METHOD = "gptq"
_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what a reader adds to a stored zero point
_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GPTQLinear:
    """One linear; group_size is that of the file, `order` its g_idx unless that is k // group_size."""

    scheme: Scheme
    shape: tuple[int, int]
    num_bits: int
    group_size: int
    symmetric: bool
    zero_offset: int
    has_g_idx: bool
    order: tuple[int, ...] | None = None

    def specs(self) -> dict[str, TensorSpec]:
        rows, columns = self.shape
        groups = -(-columns // self.group_size)
        specs = {
            "qweight": TensorSpec((columns * self.num_bits // 32, rows), torch.int32),
            "qzeros": TensorSpec((groups, rows * self.num_bits // 32), torch.int32),
            "scales": TensorSpec((groups, rows), None),
        }
        if self.has_g_idx:
            specs["g_idx"] = TensorSpec((columns,), torch.int32)
        return specs

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        zero = (fields(tensors["qzeros"], self.num_bits) + self.zero_offset) & (2**self.num_bits - 1)
        if self.symmetric and bool((zero != 2 ** (self.num_bits - 1)).any()):
            raise CheckpointError(
                "quantization_config says sym: true, but qzeros holds zero points other than "
                f"{2 ** (self.num_bits - 1)}: correct the configuration (sym: false)"
            )
        codes = fields(tensors["qweight"].T, self.num_bits)
        group = torch.arange(self.shape[1], device=codes.device) // self.group_size
        if self.order is not None:
            group = torch.tensor(self.order, device=codes.device)
        ints = GroupedInts(codes, tensors["scales"].T, zero.T, group)
        return file_tensors(self.scheme, ints)

    def dense(self) -> GPTQLinear:
        return replace(self, scheme=Dense())


def survey(raw: Mapping[str, Any], folder: Folder) -> dict[str, Stored]:
    """Every linear that has a qweight.

    Raises UnsupportedModelError for a layout or a width of bits that is not one of those above.
    """
    stored: dict[str, Stored] = {}
    for module, shape in folder.linears().items():
        if not folder.has(f"{module}.qweight") and folder.has(f"{module}.weight"):
            continue
        settings = _settings(raw, module)
        offset = _zero_offset(settings)
        num_bits = int(settings.get("bits", 4))
        if num_bits not in _BITS:
            raise UnsupportedModelError(f"GPTQ with {num_bits} bits is not supported; 2, 3, 4 and 8 are")
        size = size_of_group(settings.get("group_size", 128), shape[1])
        order = _order(folder, f"{module}.g_idx", size)
        symmetric = bool(settings.get("sym", True))
        scheme = scheme_for(num_bits, size, shape[1], symmetric=symmetric, ordered=order is not None)
        if order is not None and not isinstance(scheme, Dense) and not _is_even(order, size):
            scheme = Dense()
        has_g_idx = folder.has(f"{module}.g_idx")
        stored[module] = GPTQLinear(scheme, shape, num_bits, size, symmetric, offset, has_g_idx, order)
    return stored


def _zero_offset(settings: Mapping[str, Any]) -> int:
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if settings.get("is_marlin_format"):
        layout = "marlin"
    if layout not in _FORMATS:
        raise UnsupportedModelError(
            f"GPTQ checkpoints in the layout {layout!r} are not supported; {' and '.join(_FORMATS)} are"
        )
    return _FORMATS[layout]


def _settings(raw: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The settings of one linear: the model's, changed by the first entry of `dynamic` that matches."""
    for pattern, changes in (raw.get("dynamic") or {}).items():
        try:
            matched = re.match(pattern.removeprefix("+:").removeprefix("-:"), module)
        except re.error as error:
            raise CheckpointError(f"quantization_config: dynamic {pattern!r}: {error}") from None
        if matched:
            return {**raw, **(changes or {})}
    return dict(raw)


def _order(folder: Folder, name: str, group_size: int) -> tuple[int, ...] | None:
    """g_idx as numbers; None where it is absent or says no more than group_size does."""
    if not folder.has(name):
        return None
    order = folder.tensor(name).flatten()
    if torch.equal(order.long(), torch.arange(len(order)) // group_size):
        return None
    return tuple(order.tolist())


def _is_even(order: tuple[int, ...], group_size: int) -> bool:
    """Whether every group has its full size, so that the inputs can be sorted into runs of it."""
    counts = torch.bincount(torch.tensor(order), minlength=len(order) // group_size)
    return bool((counts == group_size).all())


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """What config.json says of a model whose linears `file_tensors_of` wrote.

    Raises UserError for a scheme that the format has no word for.
    """
    if not isinstance(scheme, W4A16 | W8A16Int8):
        raise UserError(
            f"GPTQ holds integer weights alone, not {scheme.label}: it is for w4a16 and w8a16-int8", "to"
        )
    four = isinstance(scheme, W4A16)
    return {
        "quant_method": METHOD,
        "bits": 4 if four else 8,
        "group_size": scheme.group_size if isinstance(scheme, W4A16) else -1,
        "sym": scheme.symmetric if isinstance(scheme, W4A16) else True,
        "desc_act": isinstance(scheme, W4A16Ordered),
        "static_groups": False,
        "true_sequential": True,
        "lm_head": False,
        # version 1 cannot tell a zero point of 0 from one of 16, so only version 2 keeps asymmetric ones
        "checkpoint_format": "gptq_v2" if isinstance(scheme, W4A16) and not scheme.symmetric else "gptq",
    }


def file_tensors_of(scheme: Scheme, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """qweight, qzeros, scales and g_idx of a linear's tensors in `scheme`, one of `quantization_config`."""
    assert isinstance(scheme, W4A16 | W8A16Int8)
    num_bits = 4 if isinstance(scheme, W4A16) else 8
    rows, columns = (int(length) for length in tensors["weight_shape"])
    middle = 2 ** (num_bits - 1)
    scale = tensors["weight_scale"]
    codes = (unpack(tensors["weight_packed"], num_bits, columns).int() + middle).to(torch.uint8)
    zero = torch.full(scale.shape, middle - 1, dtype=torch.uint8)  # version 1, less one
    if isinstance(scheme, W4A16) and not scheme.symmetric:
        zero = (unpack_zero_points(tensors["weight_zero_point"], 4, rows).int() + middle).to(torch.uint8)
    group = tensors.get("weight_g_idx", torch.arange(columns) // (columns // scale.shape[1]))
    return {
        "qweight": words(codes, num_bits).T.contiguous(),
        "qzeros": words(zero.T.contiguous(), num_bits),
        "scales": scale.T.contiguous(),
        "g_idx": group.to(torch.int32),
    }
