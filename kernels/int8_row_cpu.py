"""One token between int8 products on the CPU: float32 throughout, quantized as each product wants it.

With one row a step is thousands of calls of small ops, and while weights stream through the cache each of
torch's costs 6 to 7 us however little it computes, 11 us with mixed dtypes, 12 us with a Python number.
NumPy's take 1 to 2 us, so rows are float32 arrays here, [K], and their statistics Python numbers.

What is computed is `fused_norm`, `fused_activation` and `w8a8_int8`, all in float32 and nowhere rounded to
the model's dtype in between. Codes of a normed row may differ from theirs by one step where a quotient lies
within rounding of a tie.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qinfer.kernels.linear_cpu import has_int8_product, integer_sums
from qinfer.kernels.quantize_per_token import INT8_MAX, SMALLEST_SCALE

Row: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


class Int8Row(NamedTuple):
    """One quantized token: codes int8 [K, 1] and their scale, which is NaN where a number was not finite."""

    codes: Tensor
    scale: float


def quantize(x: Tensor) -> Int8Row:
    """x [1, K] -> codes and scale of `int8_per_token`."""
    return _codes(x.to(torch.float32, copy=True).numpy()[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Int8Row:
    """`fused_norm.rms_norm_int8` of x [1, H]; weight float32 [H] with the offset in it."""
    return _normed(x.float().numpy()[0], weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float
) -> tuple[Int8Row, Tensor]:
    """`fused_norm.add_rms_norm_int8` of x and residual [1, H], and the new residual, float32."""
    added: Row = x.float().numpy()
    if multiplier != 1.0:
        added = added * np.float32(multiplier)
    total = residual.float().numpy() + added
    return _normed(total[0], weight, eps), torch.from_numpy(total)


def _normed(row: Row, weight: Tensor, eps: float) -> Int8Row:
    square = float(np.vdot(row, row))
    if not math.isfinite(square):
        return _broken(row)
    normed = row * weight.numpy()
    normed *= np.float32((square / row.size + eps) ** -0.5)
    return _codes(normed)


def silu_mul(gate_up: Tensor) -> Int8Row:
    """`fused_activation.silu_mul_int8` of gate_up [1, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return _codes(F.silu(gate).mul_(up).numpy()[0])


def gelu_mul(gate_up: Tensor) -> Int8Row:
    """`fused_activation.gelu_mul_int8` of gate_up [1, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return _codes(F.gelu(gate, approximate="tanh").mul_(up).numpy()[0])


def _codes(row: Row) -> Int8Row:
    """Uses the row's memory."""
    largest = float(np.maximum.reduce(np.abs(row)))
    if not math.isfinite(largest):
        return _broken(row)
    scale = max(largest / INT8_MAX, SMALLEST_SCALE)
    np.rint(np.divide(row, np.float32(scale), out=row), out=row)
    return Int8Row(torch.from_numpy(row.astype(np.int8).reshape(-1, 1)), scale)


def _broken(row: Row) -> Int8Row:
    """What makes NaN of every output."""
    return Int8Row(torch.zeros((row.size, 1), dtype=torch.int8), math.nan)


def product(row: Int8Row, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """row times weight int8 [N, K], weight_scale float32 [N] -> float32 [1, N].

    The weight is the left operand: oneDNN packs the right one anew in every call.
    """
    if has_int8_product():
        y: Row = torch._int_mm(weight, row.codes).numpy()[:, 0].astype(np.float32)
    else:
        y = integer_sums(row.codes.float().t(), weight).numpy()[0]
    y *= weight_scale.numpy()
    y *= np.float32(row.scale)
    return torch.from_numpy(y[None])
