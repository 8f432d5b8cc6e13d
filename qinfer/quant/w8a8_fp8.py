"""`w8a8-fp8`: float8 e4m3fn weights per output channel, times float8 activations, one scale per token.

Needs no calibration: three bits of mantissa make the choice of a scale matter little. File:
compressed-tensors `float-quantized`. A token's scale is its absmax / 448, found while running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
from qinfer.quant.fp8_channel import Fp8Channel
from qinfer.quant.scheme import ActivationFormat, Scheme, number_format


@dataclass(frozen=True)
class W8A8Fp8(Fp8Channel, Scheme):
    """`weight` float8_e4m3fn [N, K], `weight_scale` [N, 1] in the model's dtype."""

    name: ClassVar[str] = "w8a8-fp8"
    activations: ClassVar[ActivationFormat] = ActivationFormat.FP8_PER_TOKEN

    def fake_quantize(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        codes, scale = ops.fp8_per_token(x)
        return (codes.float() * scale).to(x.dtype)

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
            "weights": number_format(8, "float", "channel"),
            "input_activations": number_format(8, "float", "token", dynamic=True),
        }
