"""The forms in which numbers go from op to op: plain, as 8-bit codes with a scale, or as parts of a sum.

Whoever makes numbers may leave them in the form that the next op wants, which spares a pass over them: a norm
its result in `Codes`, a product its `Parts`. On a CPU one token has a form of its own, `Int8Row`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from qinfer.kernels import int8_row_cpu as _int8_row_cpu
from qinfer.kernels import sums as _sums
from qinfer.kernels.int8_row_cpu import Int8Row


@dataclass(frozen=True, slots=True)
class Codes:
    """Activations that are quantized already: values [T, K] int8 or e4m3, scale float32 [T, 1].

    `dtype` is that of the model's activations, in which a product returns its result.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype


Activations: TypeAlias = Tensor | Codes | Int8Row


class Parts(NamedTuple):
    """A product on a GPU that cut its inner dimension: partial sums float32 [S, T, N], of `dtype` in all.

    The op that takes them adds them up in their order.
    """

    sums: Tensor
    dtype: torch.dtype


Product: TypeAlias = Tensor | Parts
"""What a product leaves; `add_rms_norm` takes it as it is, for others `scaled` finishes it."""


def whole_or_parts(y: Tensor, dtype: torch.dtype) -> Product:
    """What a kernel returned, whose parts have a dimension more than a whole product."""
    return Parts(y, dtype) if y.dim() == 3 else y


def is_int8_row(codes: torch.dtype | None, x: Tensor) -> bool:
    """Whether x, to become `codes`, is one token on a CPU, of which a product leaves float32."""
    return codes is torch.int8 and x.shape[0] == 1 and not x.is_cuda


def as_row(codes: torch.dtype | None, x: Activations) -> Activations:
    """x, quantized where it is one token on a CPU and the product to come wants `codes`."""
    if isinstance(x, Tensor) and is_int8_row(codes, x):
        return _int8_row_cpu.quantize(x)
    return x


def scaled(product: Product) -> Tensor:
    """A product as numbers [T, N]."""
    if isinstance(product, Tensor):
        return product
    return _sums.summed(product.sums).to(product.dtype)
