"""Gated activations together with what surrounds them: the split-K sum before, the quantization after.

gate_up is [T, 2 I] or partial sums [S, T, 2 I], the gate first. As in `fused_norm`, everything is float32
until the one rounding to what is stored; the single ops round the activation, the product and the codes.
"""

import torch
from torch import Tensor

from qinfer.kernels.activation import gelu_mul, silu_mul
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token
from qinfer.kernels.sums import summed


def silu_mul_parts(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up [T, I] in `dtype`, of partial sums."""
    return silu_mul(summed(gate_up)).to(dtype)


def gelu_mul_parts(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """gelu_tanh(gate) * up [T, I] in `dtype`, of partial sums."""
    return gelu_mul(summed(gate_up)).to(dtype)


def silu_mul_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, I] and scale float32 [T, 1] of silu(gate) * up."""
    return int8_per_token(silu_mul(summed(gate_up)))


def silu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [T, I] and scale float32 [T, 1] of silu(gate) * up."""
    return fp8_per_token(silu_mul(summed(gate_up)))


def gelu_mul_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, I] and scale float32 [T, 1] of gelu_tanh(gate) * up."""
    return int8_per_token(gelu_mul(summed(gate_up)))


def gelu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [T, I] and scale float32 [T, 1] of gelu_tanh(gate) * up."""
    return fp8_per_token(gelu_mul(summed(gate_up)))
