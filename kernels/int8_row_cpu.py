"""One token on its way into an int8 product on the CPU: quantization folded into what makes its row.

With one row a step is thousands of calls of small ops, and while weights stream through the cache each costs
6 to 7 us however little it computes, 11 us with mixed dtypes, 12 us with a Python number. So the row's
statistics become Python numbers, and the factor that is common to a normed row stays out of it until the
product: the codes of h / rms(h) are those of h, only the scale is divided. Where a product is added to the
residual stream, its token's scale is the factor of that addition.

What is computed is `fused_norm` and `fused_activation`: float32, rounded to codes alone. Codes of a normed
row may differ from theirs by one step where a quotient lies within rounding of a tie. Codes travel in
bfloat16, which holds them exactly and is what torch's int8 weight op reads. Its sums are float32, but it
rounds the sum times `weight_scale` to bfloat16 before the token's scale comes in: two roundings, not one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qinfer.kernels.quantize_per_token import INT8_MAX, SMALLEST_SCALE


class Int8Row(NamedTuple):
    """One quantized token: codes bfloat16 [1, K], all integers, and their scale."""

    codes: Tensor
    scale: float


class Unscaled(NamedTuple):
    """A product of one token, bfloat16 [1, N], which its scale is still to be multiplied with."""

    sums: Tensor
    scale: float


def quantize(row: Tensor) -> Int8Row:
    """row float32 [1, K] -> codes and scale of `int8_per_token`."""
    low, high = torch.aminmax(row)
    scale = max(max(-low.item(), high.item()) / INT8_MAX, SMALLEST_SCALE)  # NaN stays, being the first
    return Int8Row(row.div(scale).round_().bfloat16(), scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Int8Row:
    """`fused_norm.rms_norm_int8` of x bfloat16 [1, H]."""
    wide = x.float()
    flat = wide.view(-1)
    inverse = (torch.dot(flat, flat).item() / len(flat) + eps) ** -0.5
    codes, scale = quantize(wide.mul_(weight if offset == 0.0 else weight.float() + offset))
    return Int8Row(codes, scale * inverse)


def silu_mul(gate_up: Tensor) -> Int8Row:
    """`fused_activation.silu_mul_int8` of gate_up bfloat16 [1, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return quantize(F.silu(gate).mul_(up))


def gelu_mul(gate_up: Tensor) -> Int8Row:
    """`fused_activation.gelu_mul_int8` of gate_up bfloat16 [1, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    return quantize(F.gelu(gate, approximate="tanh").mul_(up))


def product(row: Int8Row, weight: Tensor, weight_scale: Tensor) -> Unscaled:
    """row times weight int8 [N, K], weight_scale [N]."""
    return Unscaled(torch._weight_int8pack_mm(row.codes, weight, weight_scale.bfloat16()), row.scale)
