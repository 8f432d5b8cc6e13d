"""`w8a8-int8`: int8 weights, one scale per output channel, times int8 activations, one scale per token.

The inner product is one of integers; its result is multiplied by both scales. File: compressed-tensors
`int-quantized`, the codes unpacked. A token's scale is its absmax / 127, found while running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
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
class W8A8Int8(Scheme):
    """`weight` int8 [N, K], `weight_scale` [N, 1] in the model's dtype."""

    name: ClassVar[str] = "w8a8-int8"
    activations: ClassVar[ActivationFormat] = ActivationFormat.INT8_PER_TOKEN

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), torch.int8),
            "weight_scale": TensorSpec((out_features, 1), None),
        }

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight = finite_float32(weight)
        scale = symmetric_scale(ranges or absmax_ranges(weight, 1), 127.5, dtype)
        return {"weight": integer_codes(weight, scale, None, 8), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return integer_values(tensors["weight"], tensors["weight_scale"], None)

    def fake_quantize(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        codes, scale = ops.int8_per_token(x)
        return (codes * scale).to(x.dtype)

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([shard[name] for shard in shards]) for name in ("weight", "weight_scale")}

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        scale = tensors["weight_scale"].flatten().to(device, torch.float32, copy=True)
        return {"weight": ops.pack_w8a8_int8(tensors["weight"].to(device)), "weight_scale": scale}

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        return ops.w8a8_int8(x, prepared["weight"], prepared["weight_scale"], bias, in_parts=in_parts)

    def group(self) -> dict[str, Any] | None:
        return {
            "weights": number_format(8, "int", "channel"),
            "input_activations": number_format(8, "int", "token", dynamic=True),
        }
