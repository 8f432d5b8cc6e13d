"""Cosines and sines of a step's positions, as `rope` takes them."""

import torch
from torch import Tensor


def rope_angles(
    positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions [T] int64, frequencies [R / 2] float32 -> cos and sin [T, R] in `dtype`.

    The angle of a pair is position * frequency, in float32 as published models were trained; both are
    multiplied by `magnitude` and repeated for the pair's second half, the first half of the sines negative.
    """
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
