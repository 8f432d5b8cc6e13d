"""`w8a8-fp8`: float8 e4m3fn weights per output channel, times float8 activations, one scale per token.

Needs no calibration: three bits of mantissa make the choice of a scale matter little. File:
compressed-tensors `float-quantized`. A token's scale is its absmax / 448, found while running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
from qinfer.quant.rounding import FP8_MAX, Ranges, absmax_ranges, finite_float32, fp8_codes, symmetric_scale
from qinfer.quant.scheme import ActivationFormat, TensorSpec, joined


@dataclass(frozen=True)
class W8A8Fp8:
    """`weight` float8_e4m3fn [N, K], `weight_scale` [N, 1] in the model's dtype."""

    name: ClassVar[str] = "w8a8-fp8"
    activations: ClassVar[ActivationFormat] = ActivationFormat.FP8_PER_TOKEN

    @property
    def label(self) -> str:
        return self.name

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), torch.float8_e4m3fn),
            "weight_scale": TensorSpec((out_features, 1), None),
        }

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight = finite_float32(weight)
        scale = symmetric_scale(ranges or absmax_ranges(weight, 1), FP8_MAX, dtype)
        return {"weight": fp8_codes(weight, scale), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * tensors["weight_scale"].float()

    def fake_quantize(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        codes, scale = ops.fp8_per_token(x)
        return (codes.float() * scale).to(x.dtype)

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: joined([shard[name] for shard in shards]) for name in ("weight", "weight_scale")}

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight = ops.pack_w8a8_fp8(tensors["weight"].to(device), dtype)
        return {"weight": weight, "weight_scale": tensors["weight_scale"].flatten().to(device, torch.float32)}

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        return ops.w8a8_fp8(x, prepared["weight"], prepared["weight_scale"], bias, in_parts=in_parts)

    def group(self) -> dict[str, Any] | None:
        return {
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "group_size": None,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "group_size": None,
                "dynamic": True,
            },
        }
