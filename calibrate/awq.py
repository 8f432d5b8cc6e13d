"""AWQ: protects the weight channels that large activations read (Lin et al. 2023, arXiv 2306.00978).

At 4 bits every weight of a group is rounded by the same step, but the errors in columns that meet large
inputs cost most. Multiplying such a column by s > 1 before rounding (and dividing the input) makes its
relative error smaller. How large s should be is searched, not derived:

    plain  s = mean|x|^r                       r = 0.1, 0.2 ... 1
    duo    s = mean|x|^r / mean|w|^(1-r)       r = 0, 1/9 ... 1

with mean|w| taken after each group is divided by its largest value. Each candidate is judged by the squared
error of the module's output with the weights really quantized, and must beat the identity, which is always
in the grid. A channel that no token excites says nothing and keeps s = 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

NUM_GRID = 20  # candidates besides the identity, half of them plain and half duo
_DUO_FLOOR = 1e-4
_SCALE_FLOOR = 1e-4
_GROUP_FLOOR = 1e-6


def relative_magnitude(weight: Tensor, group_size: int) -> Tensor:
    """mean over the rows of |W| / max|W| of its group: [N, K] -> [K], float32, within [0, 1]."""
    rows, width = weight.shape
    groups = weight.float().abs().view(rows, width // group_size, group_size)
    return (groups / (groups.amax(-1, keepdim=True) + _GROUP_FLOOR)).mean(0).reshape(-1)


def awq_scale(x_mean: Tensor, w_mean: Tensor, ratio: float, *, duo: bool) -> Tensor:
    """One candidate [K], float32: finite, positive, centred so that max * min = 1 over the live channels."""
    live = (x_mean > 0) & torch.isfinite(x_mean) & (w_mean > 0) & torch.isfinite(w_mean)
    x = torch.where(live, x_mean.float(), 1.0)
    scale = x**ratio
    if duo:
        scale = scale / (torch.where(live, w_mean.float(), 1.0) ** (1 - ratio) + _DUO_FLOOR)
    scale = scale.clamp(min=_SCALE_FLOOR)
    if bool(live.any()):
        scale = scale / (scale[live].max() * scale[live].min()).sqrt()
    return torch.where(live & torch.isfinite(scale) & (scale > 0), scale, 1.0)


def candidates(x_mean: Tensor, w_mean: Tensor) -> Iterator[tuple[dict[str, float], Tensor]]:
    """What the search tries, identity first: ({"ratio": r, "duo": 0 or 1}, scale [K])."""
    yield {"ratio": 0.0, "duo": 0}, torch.ones_like(x_mean, dtype=torch.float32)
    half = NUM_GRID // 2
    for i in range(half):
        ratio = (i + 1) / half
        yield {"ratio": ratio, "duo": 0}, awq_scale(x_mean, w_mean, ratio, duo=False)
    for i in range(half):
        ratio = i / half  # duo at 1.0 is plain at 1.0
        yield {"ratio": ratio, "duo": 1}, awq_scale(x_mean, w_mean, ratio, duo=True)
