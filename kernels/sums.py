"""What becomes of the sums of a product: parts added up in their order, a bias, one rounding."""

import torch
from torch import Tensor


def summed(x: Tensor) -> Tensor:
    """x [T, N], or the sum of partial sums [S, T, N] in their order, in float32."""
    if x.dim() == 2:
        return x.float()
    first, *others = x.float().unbind(0)
    return sum(others, start=first)


def rounded(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums float32 [T, N] plus bias [N] -> `dtype`."""
    return (sums if bias is None else sums + bias.float()).to(dtype)
