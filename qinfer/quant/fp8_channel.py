"""Float8 weights with one scale per output channel: what `w8a8-fp8` and `w8a16-fp8` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qinfer.quant.rounding import FP8_MAX, Ranges, absmax_ranges, finite_float32, fp8_codes, symmetric_scale
from qinfer.quant.scheme import TensorSpec, joined


class Fp8Channel:
    """`weight` float8_e4m3fn [N, K], `weight_scale` [N, 1] in the model's dtype; methods as in `Scheme`."""

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

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: joined([shard[name] for shard in shards]) for name in ("weight", "weight_scale")}
