"""Dynamic quantization of activations: one scale per token, from its largest magnitude.

A row of zeros gets the smallest normal scale and codes of zero. A row that holds NaN or infinity gets that
for its scale, so whatever is computed from it is NaN as well and the damage stays visible.
"""

import torch
from torch import Tensor

INT8_MAX = 127.0
FP8_MAX = 448.0  # of float8 e4m3fn
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes int8 [T, K] in -127..127 and scale float32 [T, 1] = absmax / 127."""
    x = x.float()
    scale = _scale(x, INT8_MAX)
    return (x / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, 1] = absmax / 448."""
    x = x.float()
    scale = _scale(x, FP8_MAX)
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def _scale(x: Tensor, largest_code: float) -> Tensor:
    return (x.abs().amax(-1, keepdim=True) / largest_code).clamp_min(SMALLEST_SCALE)
