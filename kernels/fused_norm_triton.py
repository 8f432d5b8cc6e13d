"""The ops of `fused_norm` on a GPU, each one launch of the kernel in `norm_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels.norm_triton import Norm, run


def rms_norm_int8(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """As its meaning; declines rows longer than 32768 and more than 16 partial sums, like all here."""
    return _coded(x, Norm(weight, eps, offset), torch.int8)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """As its meaning."""
    return _coded(x, Norm(weight, eps, offset), torch.float8_e4m3fn)


def rms_norm_parts(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As its meaning."""
    return run(x, Norm(weight, eps, offset), dtype).stored


def add_rms_norm_parts(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As its meaning."""
    out = run(x, Norm(weight, eps, offset), residual.dtype, residual, multiplier)
    assert out.total is not None
    return out.stored, out.total


def add_rms_norm_int8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """As its meaning."""
    return _added_and_coded(x, residual, Norm(weight, eps, offset), multiplier, torch.int8)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """As its meaning."""
    return _added_and_coded(x, residual, Norm(weight, eps, offset), multiplier, torch.float8_e4m3fn)


def _coded(x: Tensor, norm: Norm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = run(x, norm, dtype)
    assert out.scale is not None
    return out.stored, out.scale


def _added_and_coded(
    x: Tensor, residual: Tensor, norm: Norm, multiplier: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    out = run(x, norm, dtype, residual, multiplier)
    assert out.scale is not None
    assert out.total is not None
    return out.stored, out.scale, out.total
