"""`w8a8-fp8-block`: float8 weights with a scale per 128x128 block, activations with one per token and 128.

The format of DeepSeek-V3's and Qwen3's float8 checkpoints; finer scales than `w8a8-fp8` on both sides. The
last block of rows or columns may be narrower. Other readers want widths that are multiples of 128; here any
width runs on a CPU, and a GPU needs multiples for all but the last of the linears that run as one product.
File: compressed-tensors `float-quantized` with strategy block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from qinfer import ops
from qinfer.errors import UserError
from qinfer.quant.rounding import FP8_MAX, Ranges, finite_float32, fp8_codes, stored_scale
from qinfer.quant.scheme import ActivationFormat, Scheme, TensorSpec, joined, number_format

BLOCK = 128


@dataclass(frozen=True)
class W8A8Fp8Block(Scheme):
    """`weight` float8_e4m3fn [N, K], `weight_scale` [ceil(N/128), ceil(K/128)] in the model's dtype."""

    name: ClassVar[str] = "w8a8-fp8-block"
    activations: ClassVar[ActivationFormat] = ActivationFormat.FP8_PER_128

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        return {
            "weight": TensorSpec((out_features, in_features), torch.float8_e4m3fn),
            "weight_scale": TensorSpec((-(-out_features // BLOCK), -(-in_features // BLOCK)), None),
        }

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """`ranges`, if given, are per row and 128 columns, [N, ceil(K/128)]: the widest of a block counts."""
        weight = finite_float32(weight)
        if ranges is None:
            columns = functional.pad(weight.abs(), (0, -weight.shape[1] % BLOCK))
            widest = columns.view(len(weight), -1, BLOCK).amax(-1)
        else:
            widest = torch.maximum(ranges[0].abs(), ranges[1].abs()).float()
        rows = functional.pad(widest, (0, 0, 0, -len(widest) % BLOCK))
        blocks = rows.view(-1, BLOCK, rows.shape[1]).amax(1)
        scale = stored_scale(blocks / FP8_MAX, dtype)
        codes = fp8_codes(weight, _of_weights(scale, weight.shape))
        return {"weight": codes, "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = tensors["weight"].float()
        return weight * _of_weights(tensors["weight_scale"].float(), weight.shape)

    def fake_quantize(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        codes, scale = ops.fp8_per_group(x)
        return (codes.float() * scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]).to(x.dtype)

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Scales per block where blocks of the joined rows are those of the shards, else one per row."""
        scales = [shard["weight_scale"] for shard in shards]
        if any(len(shard["weight"]) % BLOCK for shard in shards[:-1]):
            scales = [_of_rows(shard["weight_scale"], len(shard["weight"])) for shard in shards]
        return {"weight": joined([shard["weight"] for shard in shards]), "weight_scale": torch.cat(scales)}

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Raises UserError on a GPU for joined rows that blocks of 128 do not divide."""
        weight, scale = tensors["weight"].to(device), tensors["weight_scale"].to(device)
        if weight.is_cuda and len(scale) > -(-len(weight) // BLOCK):
            raise UserError(
                "on a GPU w8a8-fp8-block needs q, k and gate of a multiple of 128 rows, which this model "
                "does not have: quantize it as w8a8-fp8, or serve it on a CPU",
                "scheme",
            )
        return ops.pack_w8a8_fp8_block(weight, scale, _of_rows(scale, len(weight)), dtype)

    def matmul(
        self,
        x: ops.Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> ops.Product:
        assert isinstance(x, Tensor)
        return ops.w8a8_fp8_block(x, prepared, bias)

    def group(self) -> dict[str, Any] | None:
        return {
            "weights": number_format(8, "float", "block", block_structure=[BLOCK, BLOCK]),
            "input_activations": number_format(8, "float", "group", group_size=BLOCK, dynamic=True),
        }


def _of_rows(scale: Tensor, rows: int) -> Tensor:
    """Scales per block, or already per row, -> [rows, ceil(K/128)]."""
    return scale if len(scale) == rows else scale.repeat_interleave(BLOCK, 0)[:rows]


def _of_weights(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales per block or row -> one for every weight, [N, K]."""
    return _of_rows(scale, shape[0]).repeat_interleave(BLOCK, 1)[:, : shape[1]]
