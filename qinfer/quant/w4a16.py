"""`w4a16`: 4-bit weights in groups of 32, 64 or 128 inputs that share a scale; activations untouched.

Asymmetric groups add a zero point, which small models need badly. File: compressed-tensors `pack-quantized`
with 4 bits, eight codes a word; a symmetric file has no zero-point tensor at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
from qinfer.errors import UserError
from qinfer.quant.packing import pack, pack_zero_points, packed_length, unpack, unpack_zero_points
from qinfer.quant.rounding import (
    Ranges,
    absmax_ranges,
    asymmetric_scale,
    finite_float32,
    integer_codes,
    integer_values,
    symmetric_scale,
)
from qinfer.quant.scheme import ActivationFormat, Scheme, TensorSpec, number_format

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class W4A16(Scheme):
    """`weight_packed` int32 [N, K/8], `weight_scale` [N, G = K/group], `weight_shape` int64 [2] = (N, K).

    Asymmetric: also `weight_zero_point` int32 [ceil(N/8), G]. Raises UserError for a group size that is not
    one of `GROUP_SIZES`.
    """

    group_size: int = 128
    symmetric: bool = False

    name: ClassVar[str] = "w4a16"
    activations: ClassVar[ActivationFormat] = ActivationFormat.NONE

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise UserError(
                f"group size {self.group_size} is not supported; choose 128, 64 or 32", "group_size"
            )

    @property
    def label(self) -> str:
        return f"{self.name} g{self.group_size} {'sym' if self.symmetric else 'asym'}"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        groups = self._groups(in_features)
        specs = {
            "weight_packed": TensorSpec((out_features, packed_length(in_features, 4)), torch.int32),
            "weight_scale": TensorSpec((out_features, groups), None),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if not self.symmetric:
            specs["weight_zero_point"] = TensorSpec((packed_length(out_features, 4), groups), torch.int32)
        return specs

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight = finite_float32(weight)
        ranges = ranges or absmax_ranges(weight, self._groups(weight.shape[-1]))
        zero_point = None
        if self.symmetric:
            scale = symmetric_scale(ranges, 7.5, dtype)
        else:
            scale, zero_point = asymmetric_scale(ranges, 4, dtype)
        return self._file_tensors(integer_codes(weight, scale, zero_point, 4), scale, zero_point)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return integer_values(self._codes(tensors), tensors["weight_scale"], self._zero_point(tensors))

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        fused = {
            name: torch.cat([shard[name] for shard in shards]) for name in ("weight_packed", "weight_scale")
        }
        rows = [int(shard["weight_shape"][0]) for shard in shards]
        fused["weight_shape"] = torch.tensor([sum(rows), int(shards[0]["weight_shape"][1])])
        if not self.symmetric:
            # Zero points are packed down the rows, so shards are joined unpacked: 8 rows share a word.
            zero_points = [
                unpack_zero_points(shard["weight_zero_point"], 4, count)
                for shard, count in zip(shards, rows, strict=True)
            ]
            fused["weight_zero_point"] = pack_zero_points(torch.cat(zero_points), 4)
        return fused

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        scale = tensors["weight_scale"]
        zero_point = self._zero_point(tensors)
        zero = torch.full_like(scale, 8, dtype=torch.int32) if zero_point is None else zero_point.int() + 8
        # The words' bytes, read in memory order, are the kernel's layout: two codes a byte, low nibble first.
        weight = tensors["weight_packed"].view(torch.uint8)
        return ops.pack_w4a16(weight.to(device), scale.to(device, dtype), zero.to(device, torch.uint8))

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        return ops.w4a16(x, prepared, bias, in_parts=in_parts)

    def group(self) -> dict[str, Any] | None:
        return {
            "weights": number_format(4, "int", "group", symmetric=self.symmetric, group_size=self.group_size),
            "input_activations": None,
        }

    def _groups(self, in_features: int) -> int:
        if in_features % self.group_size:
            raise UserError(
                f"group size {self.group_size} does not divide the input width {in_features}", "group_size"
            )
        return in_features // self.group_size

    def _file_tensors(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        tensors = {
            "weight_packed": pack(codes, 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor(codes.shape, device=codes.device),
        }
        if zero_point is not None:
            tensors["weight_zero_point"] = pack_zero_points(zero_point, 4)
        return tensors

    def _codes(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return unpack(tensors["weight_packed"], 4, int(tensors["weight_shape"][1]))

    def _zero_point(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if self.symmetric:
            return None
        return unpack_zero_points(tensors["weight_zero_point"], 4, tensors["weight_scale"].shape[0])
