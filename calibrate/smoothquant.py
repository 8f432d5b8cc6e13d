"""SmoothQuant: moves the outliers of activations into the weights (Xiao et al. 2022, arXiv 2211.10438).

A few channels of a linear's input are a hundred times larger than the rest; one scale per token then leaves
the rest few steps. Weights have no such outliers. So channel j of the input is divided by

    s_j = max|X_j|^a / max|W_:,j|^(1-a)

with maxima over the calibration tokens and over every linear that reads the input, and the weight's column
takes s_j. How much to move (a) depends on the place: each mapping tries the grid below and keeps the value
with the least squared error of the module's output under the real scheme; 0 stands for no smoothing, and a
tie goes to the smaller a.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MAPPINGS = ("norm->qkv", "norm->gate_up", "up->down")
_FLOOR = 1e-5  # of both maxima and of the scale, as the authors have it


def smoothing_scale(x_absmax: Tensor, w_absmax: Tensor, alpha: float) -> Tensor:
    """The scale [K] that divides the input, float32, from the maxima of its channels and of the columns.

    `alpha` 0 means no smoothing: all ones. A channel that is zero throughout keeps 1.
    """
    if alpha == 0.0:
        return torch.ones_like(x_absmax, dtype=torch.float32)
    x = x_absmax.float().clamp(min=_FLOOR)
    w = w_absmax.float().clamp(min=_FLOOR)
    scale = (x**alpha / w ** (1 - alpha)).clamp(min=_FLOOR)
    return torch.where((x_absmax > 0) & (w_absmax > 0), scale, 1.0)


def candidates(x_absmax: Tensor, w_absmax: Tensor) -> Iterator[tuple[dict[str, float], Tensor]]:
    """What the search tries, smallest alpha first: ({"alpha": a}, scale [K])."""
    for alpha in ALPHAS:
        yield {"alpha": alpha}, smoothing_scale(x_absmax, w_absmax, alpha)
