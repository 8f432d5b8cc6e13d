"""`w8a16-int8`: int8 weights, one scale per output channel, activations untouched.

For memory, not for integer arithmetic: weights are widened as they are read. File: compressed-tensors
`pack-quantized` with 8 bits (`int-quantized` without activations is refused by readers), four codes a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
from qinfer.quant.packing import pack, packed_length, unpack
from qinfer.quant.rounding import (
    Ranges,
    absmax_ranges,
    finite_float32,
    integer_codes,
    integer_values,
    symmetric_scale,
)
from qinfer.quant.scheme import ActivationFormat, Scheme, TensorSpec, number_format


@dataclass(frozen=True)
class W8A16Int8(Scheme):
    """`weight_packed` int32 [N, ceil(K/4)], `weight_scale` [N, 1], `weight_shape` int64 [2] = (N, K)."""

    name: ClassVar[str] = "w8a16-int8"
    activations: ClassVar[ActivationFormat] = ActivationFormat.NONE

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {
            "weight_packed": TensorSpec((out_features, packed_length(in_features, 8)), torch.int32),
            "weight_scale": TensorSpec((out_features, 1), None),
            "weight_shape": TensorSpec((2,), torch.int64),
        }

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight = finite_float32(weight)
        scale = symmetric_scale(ranges or absmax_ranges(weight, 1), 127.5, dtype)
        return {
            "weight_packed": pack(integer_codes(weight, scale, None, 8), 8),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape, device=weight.device),
        }

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return integer_values(self._codes(tensors), tensors["weight_scale"], None)

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        fused = {
            name: torch.cat([shard[name] for shard in shards]) for name in ("weight_packed", "weight_scale")
        }
        rows = sum(int(shard["weight_shape"][0]) for shard in shards)
        return {**fused, "weight_shape": torch.tensor([rows, int(shards[0]["weight_shape"][1])])}

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        packed = tensors["weight_packed"].to(device)
        weight = ops.pack_w8a16_int8(unpack(packed, 8, int(tensors["weight_shape"][1])))
        return {"weight": weight, "weight_scale": tensors["weight_scale"].flatten().to(device, dtype)}

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        return ops.w8a16_int8(x, prepared["weight"], prepared["weight_scale"], bias, in_parts=in_parts)

    def group(self) -> dict[str, Any] | None:
        return {
            "weights": number_format(8, "int", "channel"),
            "input_activations": None,
        }

    def _codes(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return unpack(tensors["weight_packed"], 8, int(tensors["weight_shape"][1]))
