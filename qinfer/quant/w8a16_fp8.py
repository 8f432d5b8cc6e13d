"""`w8a16-fp8`: float8 e4m3fn weights, one scale per output channel, activations untouched.

For memory, where activations must not be rounded and the machine multiplies no float8. File:
compressed-tensors `naive-quantized`.
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
class W8A16Fp8(Fp8Channel, Scheme):
    """`weight` float8_e4m3fn [N, K], `weight_scale` [N, 1] in the model's dtype."""

    name: ClassVar[str] = "w8a16-fp8"
    activations: ClassVar[ActivationFormat] = ActivationFormat.NONE

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight = ops.pack_w8a16_fp8(tensors["weight"].to(device), dtype)
        return {"weight": weight, "weight_scale": tensors["weight_scale"].flatten().to(device, torch.float32)}

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        return ops.w8a16_fp8(x, prepared["weight"], prepared["weight_scale"], bias)

    def group(self) -> dict[str, Any] | None:
        return {
            "weights": number_format(8, "float", "channel"),
            "input_activations": None,
        }
