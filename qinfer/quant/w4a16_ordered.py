"""`w4a16` whose groups are not neighbours: GPTQ's act-order, where the inputs were grouped by importance.

`weight_g_idx` names the group of each input. The weight is sorted into groups once, when it is made ready;
what is left while running is to sort a linear's inputs the same way, one gather of x before the product.
Files of compressed-tensors with `actorder: group` and GPTQ's with `desc_act` are of this kind. qinfer does
not make them: sorted while calibrating and put back (static act-order), the accuracy is the same for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qinfer import ops
from qinfer.errors import CheckpointError
from qinfer.quant.packing import pack
from qinfer.quant.scheme import TensorSpec
from qinfer.quant.w4a16 import W4A16


@dataclass(frozen=True)
class W4A16Ordered(W4A16):
    """As W4A16, and `weight_g_idx` int32 [K]; every group has `group_size` inputs."""

    @property
    def label(self) -> str:
        return f"{super().label} act-order"

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {
            **super().specs(out_features, in_features),
            "weight_g_idx": TensorSpec((in_features,), torch.int32),
        }

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        order = self._order(tensors)
        return super().dequantize(self._sorted(tensors, order))[:, order.argsort()]

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        order = shards[0]["weight_g_idx"]
        if not all(torch.equal(shard["weight_g_idx"], order) for shard in shards):
            raise CheckpointError(
                "linears that run as one product group their inputs differently (weight_g_idx), which is not "
                "supported"
            )
        return {**super().fuse(shards), "weight_g_idx": order}

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        order = self._order(tensors)
        return {**super().prepare(self._sorted(tensors, order), device, dtype), "order": order.to(device)}

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        weight = {name: tensor for name, tensor in prepared.items() if name != "order"}
        return super().matmul(x.index_select(1, prepared["order"]), weight, bias, in_parts=in_parts)

    def group(self) -> dict[str, Any] | None:
        group = super().group()
        assert group is not None
        return {**group, "weights": {**group["weights"], "actorder": "group"}}

    def _order(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Inputs by group, [K]; raises CheckpointError unless every group has its size."""
        g_idx = tensors["weight_g_idx"].long()
        groups = tensors["weight_scale"].shape[1]
        if not torch.equal(
            g_idx.sort().values, torch.arange(groups * self.group_size).to(g_idx) // self.group_size
        ):
            raise CheckpointError(
                f"weight_g_idx does not put {self.group_size} inputs into each of {groups} groups"
            )
        return g_idx.argsort(stable=True)

    def _sorted(self, tensors: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
        return {**tensors, "weight_packed": pack(self._codes(tensors)[:, order].contiguous(), 4)}
