"""One token on its way into an int8 product on the CPU: quantization folded into what makes its row.

With one row a step is thousands of calls of small ops, and while weights stream through the cache each of
torch's costs 6 to 7 us however little it computes, 11 us with mixed dtypes, 12 us with a Python number.
NumPy's take 1 to 2 us, so rows are float32 arrays here: a norm with its codes went from 49 us to 28. A row's
statistics are Python numbers, and the factor that is common to a normed row stays out of it until the
product: the codes of h / rms(h) are those of h, only the scale is divided. Where a product is added to the
residual stream, its token's scale is the factor of that addition.

What is computed is `fused_norm` and `fused_activation`: float32, rounded to codes alone. Codes of a normed
row may differ from theirs by one step where a quotient lies within rounding of a tie. Codes travel in
bfloat16, which holds them exactly and is what torch's int8 weight op reads. Its sums are float32, but it
rounds the sum times `weight_scale` to bfloat16 before the token's scale comes in: two roundings, not one.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qinfer.kernels.quantize_per_token import INT8_MAX, SMALLEST_SCALE

Row: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


class Int8Row(NamedTuple):
    """One quantized token: codes bfloat16 [1, K], all integers, and their scale."""

    codes: Tensor
    scale: float


class Unscaled(NamedTuple):
    """A product of one token, bfloat16 [1, N], which its scale is still to be multiplied with."""

    sums: Tensor
    scale: float


def quantize(x: Tensor) -> Int8Row:
    """x bfloat16 or float32 [1, K] -> codes and scale of `int8_per_token`."""
    return _codes(_row(x))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Int8Row:
    """`fused_norm.rms_norm_int8` of x bfloat16 [1, H]; weight float32 [H] with the offset in it."""
    row = _row(x)
    inverse = (float(row.dot(row)) / row.size + eps) ** -0.5
    with np.errstate(invalid="ignore", over="ignore"):  # infinity times 0: NaN, which is meant
        row *= weight.numpy()
    codes, scale = _codes(row)
    return Int8Row(codes, scale * inverse)


def silu_mul(gate_up: Tensor) -> Int8Row:
    """`fused_activation.silu_mul_int8` of gate_up bfloat16 [1, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return quantize(F.silu(gate).mul_(up))


def gelu_mul(gate_up: Tensor) -> Int8Row:
    """`fused_activation.gelu_mul_int8` of gate_up bfloat16 [1, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return quantize(F.gelu(gate, approximate="tanh").mul_(up))


def _row(x: Tensor) -> Row:
    """A float32 copy of x [1, K], as [K]."""
    row: Row = x.to(torch.float32, copy=True).numpy()[0]
    return row


def _codes(row: Row) -> Int8Row:
    """Uses the row's memory."""
    scale = max(float(np.abs(row).max()) / INT8_MAX, SMALLEST_SCALE)  # NaN stays, being the first
    if math.isfinite(scale):
        np.rint(np.divide(row, np.float32(scale), out=row), out=row)
    else:
        row.fill(math.nan)
    return Int8Row(torch.from_numpy(row).unsqueeze(0).bfloat16(), scale)


def product(row: Int8Row, weight: Tensor, weight_scale: Tensor) -> Unscaled:
    """row times weight int8 [N, K], weight_scale [N]."""
    return Unscaled(torch._weight_int8pack_mm(row.codes, weight, weight_scale.bfloat16()), row.scale)
