"""Rotary position embedding (Su et al. 2021), the half-split layout of all published decoders.

Dimension i of a head turns together with dimension i + R/2, by the angle position * frequency[i]:

    out[i]       = x[i]       * cos - x[i + R/2] * sin
    out[i + R/2] = x[i + R/2] * cos + x[i]       * sin

Cosines and sines are the same for all heads and all layers of a kind, so they are made once a step and come
in here at full width, the first half of the sines already negative: then both lines are one product and sum.
"""

import torch
from torch import Tensor


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the first R dimensions of every head and leaves the others.

    heads [T, N, D], may be a view; cos and sin [T, R] with R <= D, in heads' dtype, sin signed as above.
    Returns a new tensor [T, N, D].
    """
    rotary_dim = cos.shape[-1]
    whole = rotary_dim == heads.shape[-1]
    turning = heads if whole else heads[..., :rotary_dim]
    swapped = turning.roll(rotary_dim // 2, dims=-1)
    turned = torch.addcmul(turning * cos.unsqueeze(1), swapped, sin.unsqueeze(1))
    return turned if whole else torch.cat((turned, heads[..., rotary_dim:]), dim=-1)
