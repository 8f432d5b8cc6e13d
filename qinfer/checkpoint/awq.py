"""AWQ's dialect: checkpoints of AutoAWQ in its layout `gemm`.

A linear [N, K] of 4 bits is, in the file,

    qweight  int32 [K, N / 8]    eight outputs a word, nibble i holds output 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   int32 [G, N / 8]    zero points 0..15 in the same order, stored as they are; absent: 8
    scales   float16 [G, N]

so the outputs 0..7 of codes 0..7 are the word 0x75316420. The layouts `gemv` and `gemv_fast`, which few
published models have, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qinfer.checkpoint.grouped_ints import GroupedInts, file_tensors, scheme_for, size_of_group
from qinfer.checkpoint.stored import Folder, Stored
from qinfer.checkpoint.words import fields, words
from qinfer.errors import UnsupportedModelError, UserError
from qinfer.quant import W4A16, Dense, Scheme, TensorSpec, W4A16Ordered
from qinfer.quant.packing import unpack, unpack_zero_points

METHOD = "awq"
_PACK_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_READ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AWQLinear:
    """One linear; group_size is that of the file."""

    scheme: Scheme
    shape: tuple[int, int]
    group_size: int
    has_zeros: bool

    order = None

    def specs(self) -> dict[str, TensorSpec]:
        rows, columns = self.shape
        groups = -(-columns // self.group_size)
        specs = {
            "qweight": TensorSpec((columns, rows // 8), torch.int32),
            "scales": TensorSpec((groups, rows), None),
        }
        if self.has_zeros:
            specs["qzeros"] = TensorSpec((groups, rows // 8), torch.int32)
        return specs

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        codes = _outputs(tensors["qweight"])
        scale = tensors["scales"].T
        zero = torch.full_like(scale, 8, dtype=torch.uint8)
        if self.has_zeros:
            zero = _outputs(tensors["qzeros"])
        group = torch.arange(self.shape[1], device=codes.device) // self.group_size
        return file_tensors(self.scheme, GroupedInts(codes, scale, zero, group))

    def dense(self) -> AWQLinear:
        return replace(self, scheme=Dense())


def survey(raw: Mapping[str, Any], folder: Folder) -> dict[str, Stored]:
    """Every linear that has a qweight; AutoAWQ's own spellings of the settings are read as well.

    Raises UnsupportedModelError for another layout or another width than 4 bits.
    """
    layout = str(raw.get("version") or raw.get("format") or "gemm").lower()
    if layout != "gemm":
        raise UnsupportedModelError(f"AWQ checkpoints in the layout {layout!r} are not supported; gemm is")
    num_bits = int(raw.get("bits", raw.get("w_bit", 4)))
    if num_bits != 4:
        raise UnsupportedModelError(f"AWQ with {num_bits} bits is not supported; 4 bits are")
    wanted = raw.get("group_size", raw.get("q_group_size", 128))
    stored: dict[str, Stored] = {}
    for module, shape in folder.linears().items():
        if not folder.has(f"{module}.qweight") and folder.has(f"{module}.weight"):
            continue
        size = size_of_group(wanted, shape[1])
        has_zeros = bool(raw.get("zero_point", True)) or folder.has(f"{module}.qzeros")
        scheme = scheme_for(4, size, shape[1], symmetric=not has_zeros, ordered=False)
        stored[module] = AWQLinear(scheme, shape, size, has_zeros)
    return stored


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """What config.json says of a model whose linears `file_tensors_of` wrote.

    Raises UserError for a scheme that the format has no word for.
    """
    if not isinstance(scheme, W4A16) or isinstance(scheme, W4A16Ordered):
        raise UserError(
            f"AWQ holds 4-bit weights in groups of neighbours, not {scheme.label}: quantize the original "
            "model with --scheme awq",
            "to",
        )
    return {
        "quant_method": METHOD,
        "bits": 4,
        "group_size": scheme.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def file_tensors_of(scheme: Scheme, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """qweight, qzeros and scales of a linear's tensors in `scheme`, one of `quantization_config`.

    Raises UserError for a number of outputs that fills no whole words.
    """
    assert isinstance(scheme, W4A16)
    rows, columns = (int(length) for length in tensors["weight_shape"])
    if rows % 8:
        raise UserError(f"AWQ packs 8 outputs a word, and a linear here has {rows}", "to")
    scale = tensors["weight_scale"]
    codes = (unpack(tensors["weight_packed"], 4, columns) + 8).to(torch.uint8)
    zero = torch.full(scale.shape, 8, dtype=torch.uint8)
    if not scheme.symmetric:
        zero = (unpack_zero_points(tensors["weight_zero_point"], 4, rows) + 8).to(torch.uint8)
    return {
        "qweight": _words(codes.T),
        "qzeros": _words(zero.T),
        "scales": scale.T.contiguous(),
    }


def _outputs(packed: Tensor) -> Tensor:
    """int32 [R, N / 8] -> uint8 [N, R], outputs in their order; whole rows are moved, which is fast."""
    rows = torch.arange(packed.shape[1] * 8, device=packed.device).view(-1, 8)[:, _READ_ORDER]
    return fields(packed, 4).T.contiguous().index_select(0, rows.flatten())


def _words(codes: Tensor) -> Tensor:
    """uint8 [R, N] -> int32 [R, N / 8]."""
    eights = codes.reshape(codes.shape[0], -1, 8)
    return words(eights[:, :, _PACK_ORDER].flatten(1), 4)
