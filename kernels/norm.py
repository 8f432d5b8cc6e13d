"""Root mean square normalization (Zhang & Sennrich 2019), alone and with the residual addition before it.

Statistics and products are float32 whatever the input is; the result is rounded once, to the input's dtype.
Gemma stores w and multiplies by (1 + w): that is `offset`. The addition is fused because a decoder always
adds a block's output to the residual stream and normalizes the sum for the next block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension.

    x [..., H], weight [H]; returns [..., H] in x's dtype.
    """
    if offset == 0.0 and x.dtype is weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    # 1 + w is not exact in bfloat16, so everything is widened first
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The new residual, `residual + multiplier * x`, and its RMS norm: returns (normed, new residual).

    x and residual [..., H], weight [H]; both results in x's dtype. Inputs stay as they are.
    """
    total = torch.add(residual, x, alpha=multiplier)
    return rms_norm(total, weight, eps, offset), total
