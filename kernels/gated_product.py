"""The product with the gate's and up's weight in 8 bits together with the gated activation: the meaning.

The weight's rows are gates and ups in turns of 64. Columns that belong together are then in one tile of a
GPU's product, which leaves act(gate) * up instead of both: half as much to write, and to read again.
As in `fused_activation`, everything is float32 until the one rounding to what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels.activation import gelu_mul, silu_mul
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token
from qinfer.kernels.w8a8_fp8 import w8a8_fp8_codes
from qinfer.kernels.w8a8_int8 import w8a8_int8_codes

TURN = 64  # rows of the gate, then as many of up


def gated(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> Tensor:
    """act(gate) * up [T, I] in `dtype`.

    codes [T, K] int8 or e4m3 and scale float32 [T, 1]; weight of the same kind [2 I, K], or its panels, and
    weight_scale float32 [2 I]. gelu: by the tanh formula; otherwise the activation is SiLU.
    """
    return _inner(codes, scale, weight, weight_scale, gelu=gelu).to(dtype)


def gated_to_int8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, I] and scale float32 [T, 1] of `gated`; `dtype` is what a twin may round to before."""
    return int8_per_token(_inner(codes, scale, weight, weight_scale, gelu=gelu))


def gated_to_fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [T, I] and scale float32 [T, 1] of `gated`."""
    return fp8_per_token(_inner(codes, scale, weight, weight_scale, gelu=gelu))


def _inner(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, *, gelu: bool) -> Tensor:
    product = w8a8_int8_codes if codes.dtype is torch.int8 else w8a8_fp8_codes
    gate_up = product(codes, scale, weight, weight_scale, torch.float32)
    return (gelu_mul if gelu else silu_mul)(gate_up, TURN)
