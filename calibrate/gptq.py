"""GPTQ: rounds column by column and lets the columns to come make up for each error (arXiv 2210.17323).

Rounding column k of a weight by d_k costs d_k^2 / [H^-1]_kk in the squared error of the output if all later
columns move as they best can, with H = X^T X of the inputs. With U the upper Cholesky factor of H^-1:

    e = (w_k - Q(w_k)) / U_kk        w_j -= e * U_kj for every later column j

Columns are taken in the order of falling H_kk, the most used first, while nothing is yet to be made up for;
scales belong to the groups of the original order and are fixed before ("static act-order"), so the file
needs no order. Updates go to a block of columns at once and to the rest in one product per block.

H of few or alike tokens is singular. So its diagonal is raised by a hundredth of its mean, and where the
factorization still fails by ten and a hundred times that, then by a floor relative to its largest entry; if
nothing helps, the weights are rounded to nearest and that is reported. A column that no token excites takes
no part: it is rounded to nearest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.calibrate.grid import Grid

DAMP = 0.01
_BLOCK = 64
_FLOORS = tuple(1e-6 * 10**i for i in range(6))


class Rounded(NamedTuple):
    """Weights on their grid, float32 [N, K], and what was done to H, for the report ("" as usual)."""

    weight: Tensor
    note: str


def gptq(weight: Tensor, gram: Tensor, grid: Grid, group_size: int) -> Rounded:
    """Rounds `weight` float32 [N, K] to `grid`, whose step is [N, groups], for inputs of this `gram` [K, K].

    The last group may be narrower than `group_size`. Nothing is changed in place.
    """
    diagonal = gram.diagonal()
    dead = diagonal == 0
    order = diagonal.argsort(descending=True)
    factor, note = _inverse_factor(gram + torch.diag(dead.float()), order)
    if factor is None:
        columns = torch.arange(weight.shape[1], device=weight.device) // group_size
        return Rounded(grid.map(lambda x: x[:, columns]).nearest(weight), note)
    columns_first = weight.T[order].contiguous()  # a column of the weight is a row in memory
    by_group = grid.map(lambda x: x.T.contiguous())
    _round_columns(columns_first, factor, by_group, (order // group_size).tolist())
    rounded = torch.empty_like(columns_first)
    rounded[order] = columns_first
    return Rounded(rounded.T.contiguous(), note)


def _round_columns(weight: Tensor, factor: Tensor, grid: Grid, groups: list[int]) -> None:
    """Rounds the rows of `weight` [K, N] one after another, in place; `grid` is [groups, N]."""
    width = len(weight)
    pivots = factor.diagonal().tolist()
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        errors = torch.empty_like(weight[start:stop])
        for k in range(start, stop):
            group = groups[k]
            one = Grid(grid.step[group], None if grid.zero is None else grid.zero[group], grid.bits)
            rounded = one.nearest(weight[k])
            error = torch.sub(weight[k], rounded, out=errors[k - start]).div_(pivots[k])
            weight[k] = rounded
            weight[k + 1 : stop].addr_(factor[k, k + 1 : stop], error, alpha=-1)
        weight[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)


def _inverse_factor(gram: Tensor, order: Tensor) -> tuple[Tensor | None, str]:
    """The upper Cholesky factor of the inverse of `gram`, reordered and damped; None where there is none."""
    ordered = gram[order][:, order]
    mean, largest = float(ordered.diagonal().mean()), float(ordered.diagonal().max())
    raises = [(DAMP * mean, "")]
    raises += [(d * mean, f"diagonal raised by {d:g} of its mean") for d in (10 * DAMP, 100 * DAMP)]
    raises += [(f * largest, f"diagonal raised by {f:g} of its largest entry") for f in _FLOORS]
    for raised, note in raises:
        damped = ordered.clone()
        damped.diagonal().add_(raised)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse = torch.cholesky_inverse(factor)
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed) and bool(factor.isfinite().all()):
                return factor, note
    return None, "rounded to nearest: the inputs' second moments cannot be inverted"
