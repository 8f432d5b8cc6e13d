"""`w8a8-fp8-static`: float8 weights and activations with one scale each per linear, fixed by calibration.

Nothing is measured while running: the fastest float8, and the one that needs text. A linear's input scale is
the largest input of its calibration / 448; what is larger later saturates. Linears that share an input share
its scale, and one weight scale, the largest: readers that run them as one product would otherwise round them
again. File: compressed-tensors `float-quantized` with strategy tensor; scales have shape [1], because a
scalar is refused by transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
from qinfer.quant.rounding import FP8_MAX, Ranges, absmax_ranges, finite_float32, fp8_codes, stored_scale
from qinfer.quant.scheme import ActivationFormat, Scheme, TensorSpec, joined, number_format


@dataclass(frozen=True)
class W8A8Fp8Static(Scheme):
    """`weight` float8_e4m3fn [N, K]; `weight_scale` and `input_scale` [1] in the model's dtype."""

    name: ClassVar[str] = "w8a8-fp8-static"
    activations: ClassVar[ActivationFormat] = ActivationFormat.FP8_STATIC

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), torch.float8_e4m3fn),
            "weight_scale": TensorSpec((1,), None),
            "input_scale": TensorSpec((1,), None),
        }

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The input scale is NaN, which no checkpoint may hold, until `with_input_range` has set it."""
        weight = finite_float32(weight)
        low, high = ranges or absmax_ranges(weight, 1)
        scale = stored_scale((torch.maximum(low.abs(), high.abs()).amax() / FP8_MAX).view(1).float(), dtype)
        unknown = torch.full((1,), math.nan, dtype=dtype, device=weight.device)
        return {"weight": fp8_codes(weight, scale), "weight_scale": scale, "input_scale": unknown}

    def with_input_range(self, tensors: Mapping[str, Tensor], absmax: float) -> dict[str, Tensor]:
        """The file tensors for inputs of magnitudes up to `absmax`."""
        scale = torch.full((1,), absmax / FP8_MAX, device=tensors["weight"].device)
        return {**tensors, "input_scale": stored_scale(scale, tensors["weight_scale"].dtype)}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * tensors["weight_scale"].float()

    def fake_quantize(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        assert tensors is not None, "what a static scale does to x is in the file"
        scale = tensors["input_scale"].float()
        return (ops.fp8_static(x, scale).float() * scale).to(x.dtype)

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Each shard keeps its weight scale, as one per row; the largest input scale holds for all."""
        rows = [shard["weight_scale"].expand(len(shard["weight"])).unsqueeze(1) for shard in shards]
        return {
            "weight": joined([shard["weight"] for shard in shards]),
            "weight_scale": torch.cat(rows),
            "input_scale": torch.cat([shard["input_scale"] for shard in shards]).amax().view(1),
        }

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        scale = tensors["weight_scale"].flatten().to(device, torch.float32)
        return {
            "weight": ops.pack_w8a8_fp8(tensors["weight"].to(device), dtype),
            "weight_scale": scale.expand(len(tensors["weight"])).contiguous(),
            "input_scale": tensors["input_scale"].to(device, torch.float32),
        }

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        return ops.w8a8_fp8_static(
            x, prepared["weight"], prepared["weight_scale"], prepared["input_scale"], bias
        )

    def group(self) -> dict[str, Any] | None:
        tensor = number_format(8, "float", "tensor")
        return {"weights": tensor, "input_activations": dict(tensor)}
