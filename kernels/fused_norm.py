"""RMS norm together with what surrounds it in a decoder: the split-K sum before, the quantization after.

A product that cut its inner dimension leaves partial sums [S, T, H]; they are added here, in their order, on
their way through the norm. What follows the norm may be a product on 8-bit codes, whose row scale needs the
whole row, as the norm does. Everything is float32 but for two roundings: the new residual, to the dtype of
the residual stream, before it is normed; and the codes. The single ops round the normed row to the dtype of
the stream in between, so their codes may differ by one step.
"""

import torch
from torch import Tensor

from qinfer.kernels.norm import rms_norm
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token
from qinfer.kernels.sums import summed


def rms_norm_int8(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Codes int8 [T, H] and scale float32 [T, 1] of the RMS norm of x [T, H] (or partial sums [S, T, H])."""
    return int8_per_token(_normed(summed(x), weight, eps, offset))


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [T, H] and scale float32 [T, 1] of the RMS norm of x [T, H] (or partial sums [S, T, H])."""
    return fp8_per_token(_normed(summed(x), weight, eps, offset))


def rms_norm_parts(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The RMS norm [T, H] in `dtype` of what partial sums x [S, T, H] add up to."""
    return _normed(summed(x), weight, eps, offset).to(dtype)


def add_rms_norm_parts(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(normed, new residual) [T, H] in residual's dtype, of partial sums x [S, T, H]: see `add_rms_norm`."""
    total = added(x, residual, multiplier)
    return _normed(total, weight, eps, offset).to(residual.dtype), total


def add_rms_norm_int8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes int8 [T, H], scale float32 [T, 1], new residual [T, H]) of x [T, H] or partial sums [S, T, H].

    residual [T, H], weight [H]; the new residual, residual + multiplier * x, has residual's dtype.
    """
    total = added(x, residual, multiplier)
    return *int8_per_token(_normed(total, weight, eps, offset)), total


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes e4m3 [T, H], scale float32 [T, 1], new residual [T, H]): see `add_rms_norm_int8`."""
    total = added(x, residual, multiplier)
    return *fp8_per_token(_normed(total, weight, eps, offset)), total


def added(x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
    """residual + multiplier * x, rounded once, to residual's dtype."""
    return torch.add(residual.float(), summed(x), alpha=multiplier).to(residual.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return rms_norm(x.float(), weight.float(), eps, offset)
