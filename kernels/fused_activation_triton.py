"""The ops of `fused_activation` on a GPU, each one launch of the kernel in `activation_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels.activation_triton import run


def silu_mul_parts(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """As its meaning; declines more than 16 partial sums, like all here."""
    return run(gate_up, dtype, gelu=False)[0]


def gelu_mul_parts(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """As its meaning."""
    return run(gate_up, dtype, gelu=True)[0]


def silu_mul_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning; with codes, rows longer than 32768 are declined."""
    return coded(gate_up, torch.int8, gelu=False)


def silu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning."""
    return coded(gate_up, torch.float8_e4m3fn, gelu=False)


def gelu_mul_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning."""
    return coded(gate_up, torch.int8, gelu=True)


def gelu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning."""
    return coded(gate_up, torch.float8_e4m3fn, gelu=True)


def coded(
    gate_up: Tensor, dtype: torch.dtype, *, gelu: bool, turn: int | None = None
) -> tuple[Tensor, Tensor]:
    """Codes of `dtype` [T, I] and scale float32 [T, 1]; turn: as in `activation`."""
    codes, scale = run(gate_up, dtype, gelu=gelu, turn=turn)
    assert scale is not None
    return codes, scale
