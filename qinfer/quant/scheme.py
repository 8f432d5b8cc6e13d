"""A scheme says which tensors lie in the file, how to make them, what they mean and which op runs them.

Shapes are in PyTorch's order: a weight is [out_features, in_features] = [N, K]. Laws that every scheme is
tested against: `specs` equals what `quantize` makes; `dequantize(quantize(w))` lies within the format's
bound; `matmul(x, prepare(t))` is close to `fake_quantize(x) @ dequantize(t).T`; and concatenating q/k/v
along the output (`fuse`) commutes with `dequantize`, with `quantize` too where scales are per row or group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from qinfer.ops import Activations, Product
from qinfer.quant.rounding import Ranges


class ActivationFormat(Enum):
    """What happens to a linear's input before it is multiplied."""

    NONE = "none"
    INT8_PER_TOKEN = "int8 per token"
    FP8_PER_TOKEN = "fp8 per token"
    FP8_PER_128 = "fp8 per token and 128 columns"
    FP8_STATIC = "fp8 static"


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor in the checkpoint; dtype None means the model's own dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Scheme(Protocol):
    """One numeric format of a linear layer's weight and input; those that exist are frozen dataclasses."""

    name: ClassVar[str]
    activations: ClassVar[ActivationFormat]

    @property
    def label(self) -> str:
        """Name with its parameters, where it has some, for reports: 'w4a16 g64 asym'."""
        return self.name

    def specs(self, out_features: int, in_features: int) -> dict[str, TensorSpec]:
        """Tensors of one linear in the file, by suffix ('weight', 'weight_scale')."""
        ...

    def quantize(
        self, weight: Tensor, ranges: Ranges | None = None, *, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """File tensors of `weight` [N, K]; scales are rounded to `dtype`, the model's, before they are used.

        `ranges` are (low, high), each [N, groups], found by a search; without it the absolute maximum rules.
        Raises UserError where a shape does not fit; CheckpointError where the weight holds NaN or infinity.
        """
        ...

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight [N, K] in float32 that the file tensors mean."""
        ...

    def fake_quantize(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """What the linear really sees of its input [T, K], in x's dtype; a static scale is in `tensors`.

        Here as for weight-only schemes: x itself.
        """
        return x

    def fuse(self, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """File tensors of the shards' weights concatenated along the output."""
        ...

    def prepare(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """File layout -> kernel layout, once, at load; `dtype` is that of the activations to come."""
        ...

    def matmul(
        self,
        x: Activations,
        prepared: Mapping[str, Tensor],
        bias: Tensor | None = None,
        *,
        in_parts: bool = False,
    ) -> Product:
        """x [T, K] -> [T, N] in x's dtype; x may be codes where `activations` says so.

        bias [N] is for a GPU, whose kernels add it before they round; elsewhere the caller adds it. With
        `in_parts` a GPU may leave partial sums, of a product without bias.
        """
        ...

    def group(self) -> dict[str, Any] | None:
        """The compressed-tensors scheme (weights, input_activations), or None for dense."""
        ...


def joined(shards: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype, float8 too, which `torch.cat` may not know, one below the other."""
    if shards[0].element_size() > 1:
        return torch.cat(list(shards))
    return torch.cat([shard.view(torch.uint8) for shard in shards]).view(shards[0].dtype)


def number_format(
    num_bits: int,
    kind: str,
    strategy: str,
    *,
    symmetric: bool = True,
    group_size: int | None = None,
    block_structure: list[int] | None = None,
    dynamic: bool = False,
) -> dict[str, Any]:
    """How compressed-tensors writes weights or input activations of `kind` "int" or "float"."""
    written: dict[str, Any] = {
        "num_bits": num_bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size,
    }
    if block_structure is not None:
        written["block_structure"] = block_structure
    return {**written, "dynamic": dynamic}
