"""`dense`: the weight as it is in the model's own dtype; the scheme of everything that is not quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qinfer import ops
from qinfer.quant.rounding import Ranges, finite_float32
from qinfer.quant.scheme import ActivationFormat, Scheme, TensorSpec


@dataclass(frozen=True)
class Dense(Scheme):
    """No quantization: `weight` [N, K] in the model's dtype."""

    name: ClassVar[str] = "dense"
    activations: ClassVar[ActivationFormat] = ActivationFormat.NONE

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((out_features, in_features), None)}

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        assert ranges is None, "a dense weight has no range to choose"
        return {"weight": finite_float32(weight).to(dtype)}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float()

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {"weight": torch.cat([shard["weight"] for shard in shards])}

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        return {"weight": tensors["weight"].to(device, dtype)}

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        return ops.dense(x, prepared["weight"], bias)

    def group(self) -> dict[str, Any] | None:
        return None
