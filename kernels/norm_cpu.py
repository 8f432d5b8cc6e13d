"""`norm` on the CPU for many rows: a few passes over pieces of the input that stay in the cache.

torch's `rms_norm` keeps every intermediate of the whole input in memory, and widens bfloat16 twice: 1024 rows
of 576 bfloat16 take 1.2 to 2.8 ms of one core, by pieces .6 ms. Rows are independent, so where pieces end
changes no number. Rounding is the meaning's: float32 throughout, once to the input's dtype at the end.
"""

import torch
from torch import Tensor

from qinfer.kernels import norm

PIECE = 2**18  # numbers in a piece: 1 MB of float32
FEW = 2**17  # numbers below which torch's one call costs less than these several


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`norm.rms_norm`: x [..., H] of at most 32 bits a number, weight [H]; returns [..., H] in x's dtype."""
    if x.numel() < FEW or x.requires_grad:  # what is written into given memory has no gradient
        return norm.rms_norm(x, weight, eps, offset)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    weight = weight.float() + offset if offset else weight.float()
    step = max(1, PIECE // rows.shape[1])
    for piece, normed in zip(torch.split(rows, step), torch.split(out, step), strict=True):
        _rms_norm_into(normed, piece, weight, eps)
    return out.view(x.shape)


def _rms_norm_into(normed: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    target = normed if normed.dtype is torch.float32 else wide  # widened, it is a copy that may be used up
    torch.mul(wide, inverse, out=target).mul_(weight)
    if target is not normed:
        normed.copy_(target)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`norm.add_rms_norm`: (normed, new residual), all [..., H]."""
    total = torch.add(residual, x, alpha=multiplier)
    return rms_norm(total, weight, eps, offset), total
