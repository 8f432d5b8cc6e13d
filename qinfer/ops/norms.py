"""RMS norms, alone or with the residual stream, and in the form that the product after them wants."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer import backend
from qinfer.kernels import fused_norm as _fused_norm
from qinfer.kernels import int8_row_cpu as _int8_row_cpu
from qinfer.kernels import norm as _norm
from qinfer.kernels import norm_cpu as _norm_cpu
from qinfer.ops.forms import Activations, Codes, Parts, Product, is_int8_row


def add_rms_norm(
    x: Product, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(RMS norm of the new residual, the new residual = residual + multiplier * x); all [T, H]."""
    if isinstance(x, Parts):
        return backend.run(_fused_norm.add_rms_norm_parts, x.sums, residual, weight, eps, offset, multiplier)
    if x.is_cuda:
        return backend.run(_norm.add_rms_norm, x, residual, weight, eps, offset, multiplier)
    return _norm_cpu.add_rms_norm(x, residual, weight, eps, offset, multiplier)


_ADD_NORM_TO = {
    torch.int8: _fused_norm.add_rms_norm_int8,
    torch.float8_e4m3fn: _fused_norm.add_rms_norm_fp8,
}


def add_rms_norm_to(
    codes: torch.dtype | None,
    x: Product,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    multiplier: float = 1.0,
    wide: Tensor | None = None,
) -> tuple[Activations, Tensor]:
    """`add_rms_norm` for a product that wants `codes`: in one pass on a GPU, and for one token on a CPU.

    Elsewhere the product makes its own codes. `wide` is offset + weight in float32, from a caller who keeps
    it for that one token: to make it takes longer than the norm.
    """
    if isinstance(x, Parts):
        if codes is None:
            return add_rms_norm(x, residual, weight, eps, offset=offset, multiplier=multiplier)
        x = x.sums
    if is_int8_row(codes, x):
        wide = weight.float() + offset if wide is None else wide
        return _int8_row_cpu.add_rms_norm(x, residual, wide, eps, multiplier)
    if codes is None or not x.is_cuda:
        return add_rms_norm(x, residual, weight, eps, offset=offset, multiplier=multiplier)
    values, scale, total = backend.run(_ADD_NORM_TO[codes], x, residual, weight, eps, offset, multiplier)
    return Codes(values, scale, residual.dtype), total


def rms_norm(x: Product, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """RMS norm over the last dimension, times (offset + weight): [..., H] -> [..., H]."""
    if isinstance(x, Parts):
        return backend.run(_fused_norm.rms_norm_parts, x.sums, weight, eps, offset, x.dtype)
    if x.is_cuda:
        return backend.run(_norm.rms_norm, x, weight, eps, offset)
    return _norm_cpu.rms_norm(x, weight, eps, offset)


_NORM_TO = {torch.int8: _fused_norm.rms_norm_int8, torch.float8_e4m3fn: _fused_norm.rms_norm_fp8}


def rms_norm_to(
    codes: torch.dtype | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    wide: Tensor | None = None,
) -> Activations:
    """`rms_norm` for a product that wants `codes`: see `add_rms_norm_to`."""
    if is_int8_row(codes, x):
        return _int8_row_cpu.rms_norm(x, weight.float() + offset if wide is None else wide, eps)
    if codes is None or not x.is_cuda:
        return rms_norm(x, weight, eps, offset=offset)
    return Codes(*backend.run(_NORM_TO[codes], x, weight, eps, offset), x.dtype)
