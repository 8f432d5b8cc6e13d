"""Narrower ranges for groups of weights: clip the few largest so that the rest are rounded more finely.

What counts is not the weights' own error but that of the output, sum over tokens of (x_g . (w_g - Q(w_g)))^2
for each row and group. With the group's second moments M = sum x_g x_g^T that is d^T M d, exact over every
token seen and independent of their number. AWQ tries ten widths from 1 down to 0.55 of the full range, both
ends together; for a grid with a zero point each end then tries its own. The full range is always among the
candidates, so no group ends up worse than without the search.

Moving groups one by one ignores that errors of different groups meet in one output; that is AWQ's choice
too. Projections of q and k are left alone: their product passes through a softmax, which clipping distorts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Ranges = tuple[Tensor, Tensor]  # (low, high), each [N, groups]
FakeQuantize = Callable[[Tensor, Ranges], Tensor]  # weight [N, K], ranges -> what would be read back [N, K]

WIDTHS = tuple(1 - i / 20 for i in range(10))


def full_ranges(weight: Tensor, group_size: int, *, symmetric: bool) -> Ranges:
    """The range of each group of `weight` [N, K], zero included: ([N, groups], [N, groups]), float32."""
    groups = weight.float().view(weight.shape[0], -1, group_size)
    if symmetric:
        high = groups.abs().amax(-1)
        return -high, high
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def second_moments(inputs: list[Tensor], group_size: int) -> Tensor:
    """Sum over the tokens of x_g x_g^T for each group: tensors [T, K] -> [groups, g, g], float32."""
    width = inputs[0].shape[1]
    moments = torch.zeros(width // group_size, group_size, group_size)
    for x in inputs:
        groups = x.float().view(x.shape[0], -1, group_size).transpose(0, 1)
        moments += (groups.transpose(1, 2) @ groups).cpu()
    return moments.to(inputs[0].device)


def search_ranges(
    weight: Tensor, moments: Tensor, fake_quantize: FakeQuantize, *, symmetric: bool
) -> tuple[Ranges, float]:
    """The ranges with the least output error, and that error as a share of the full ranges' (at most 1).

    `weight` is [N, K], `moments` [groups, g, g] of its inputs.
    """
    full = full_ranges(weight, moments.shape[-1], symmetric=symmetric)
    best, best_error = full, _group_errors(weight, full, moments, fake_quantize)
    initial = float(best_error.sum())
    for width in WIDTHS[1:]:
        best, best_error = _better(
            weight, best, best_error, (full[0] * width, full[1] * width), moments, fake_quantize
        )
    if not symmetric:
        joint = best
        for width in WIDTHS:
            best, best_error = _better(
                weight, best, best_error, (full[0] * width, joint[1]), moments, fake_quantize
            )
        low = best[0]
        for width in WIDTHS:
            best, best_error = _better(
                weight, best, best_error, (low, full[1] * width), moments, fake_quantize
            )
    return best, float(best_error.sum()) / initial if initial > 0 else 1.0


def _better(
    weight: Tensor,
    best: Ranges,
    best_error: Tensor,
    trial: Ranges,
    moments: Tensor,
    fake_quantize: FakeQuantize,
) -> tuple[Ranges, Tensor]:
    error = _group_errors(weight, trial, moments, fake_quantize)
    wins = error < best_error
    low, high = (torch.where(wins, new, old) for new, old in zip(trial, best, strict=True))
    return (low, high), torch.where(wins, error, best_error)


def _group_errors(weight: Tensor, ranges: Ranges, moments: Tensor, fake_quantize: FakeQuantize) -> Tensor:
    """d^T M d of every row and group: [N, groups]."""
    groups, size, _ = moments.shape
    delta = (fake_quantize(weight, ranges) - weight).view(-1, groups, size).transpose(0, 1)
    return ((delta @ moments) * delta).sum(-1).T
