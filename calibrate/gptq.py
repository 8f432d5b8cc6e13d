"""GPTQ: rounds column by column and lets the columns to come make up for each error (arXiv 2210.17323).

Rounding column k of a weight by d_k costs d_k^2 / [H^-1]_kk in the squared error of the output if all later
columns move as they best can, with H = X^T X of the inputs. With U the upper Cholesky factor of H^-1:

    e = (w_k - Q(w_k)) / U_kk        w_j -= e * U_kj for every later column j

Columns are taken in the order of falling H_kk, the most used first, while nothing is yet to be made up for;
scales belong to the groups of the original order and are fixed before ("static act-order"), so the file
needs no order. Updates go to a block of columns at once and to the rest in one product per block.

GPTQ never looks back: a column is rounded before anybody knows how the later ones will be. So a sweep of
coordinate descent on the same objective follows (QuantEase, arXiv 2309.01885): each column takes the value of
its grid that is best while all others stay, which can only lower the error: on random weights by 2 %, and a
second sweep by less than one more.

The diagonal of H is raised by a tenth of its mean. That makes H of few or alike tokens invertible, and it
keeps weights from being fitted to what these tokens have by chance: from c4 to technical text, a v_proj of
SmolLM2-135M kept 0.426 of the squared error of rounding to nearest, 0.448 with a hundredth, an up_proj 0.811
against 0.829. Where the factorization still fails more is added, then a floor relative to the largest entry;
if nothing helps, the weights are rounded to nearest and that is reported. A column that no token excites
takes no part: it is rounded to nearest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.calibrate.grid import Grid

DAMP = 0.1
SWEEPS = 1  # of coordinate descent
_BLOCK = 32
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
    ordered = gram[order][:, order]
    ordered.diagonal().add_(dead[order].float())
    factor, raised, note = _inverse_factor(ordered)
    if factor is None:
        group_of = torch.arange(weight.shape[1], device=weight.device) // group_size
        return Rounded(grid.map(lambda x: x[:, group_of]).nearest(weight), note)
    original = weight.T[order].contiguous()  # a column of the weight is a row in memory
    found, groups = original.clone(), (order // group_size).tolist()
    columns = _grids(grid, groups)
    _round_columns(found, factor, columns)
    ordered.diagonal().add_(raised)
    for _ in range(SWEEPS):
        _sweep(found, original, ordered, columns)
    rounded = torch.empty_like(found)
    rounded[order] = found
    return Rounded(rounded.T.contiguous(), note)


def _grids(grid: Grid, groups: list[int]) -> list[Grid]:
    """The grid of each column, entries [N], for a grid [N, groups]; columns of a group share it."""
    steps = grid.step.T.contiguous().unbind(0)
    zeros = [None] * len(steps) if grid.zero is None else grid.zero.T.contiguous().unbind(0)
    of_group = [Grid(step, zero, grid.bits) for step, zero in zip(steps, zeros, strict=True)]
    return [of_group[group] for group in groups]


def _round_columns(weight: Tensor, factor: Tensor, grids: list[Grid]) -> None:
    """Rounds the rows of `weight` [K, N] to their grids, one after another, in place."""
    pivots = factor.diagonal().tolist()
    rows = weight.unbind(0)
    for start in range(0, len(weight), _BLOCK):
        stop = min(start + _BLOCK, len(weight))
        errors = torch.empty_like(weight[start:stop])
        for k in range(start, stop):
            rounded = grids[k].nearest(rows[k])
            error = torch.sub(rows[k], rounded, out=errors[k - start]).div_(pivots[k])
            rows[k].copy_(rounded)
            weight[k + 1 : stop].addr_(factor[k, k + 1 : stop], error, alpha=-1)
        weight[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)


def _sweep(rounded: Tensor, original: Tensor, gram: Tensor, grids: list[Grid]) -> None:
    """Gives each row of `rounded` [K, N] in turn the grid's best values for the others as they are, in place.

    `pull` is H (w - q), kept true for the rows to come: the best value of row k is q_k + pull_k / H_kk.
    """
    diagonal = gram.diagonal().tolist()
    pull = gram @ (original - rounded)
    rows, pulls = rounded.unbind(0), pull.unbind(0)
    for start in range(0, len(rounded), _BLOCK):
        stop = min(start + _BLOCK, len(rounded))
        changes = torch.empty_like(rounded[start:stop])
        for k in range(start, stop):
            best = grids[k].nearest(torch.add(rows[k], pulls[k], alpha=1 / diagonal[k]))
            change = torch.sub(best, rows[k], out=changes[k - start])
            rows[k].copy_(best)
            pull[k + 1 : stop].addr_(gram[k, k + 1 : stop], change, alpha=-1)
        pull[stop:].addmm_(gram[stop:, start:stop], changes, alpha=-1)


def _inverse_factor(ordered: Tensor) -> tuple[Tensor | None, float, str]:
    """The upper Cholesky factor of the inverse of a gram, what its diagonal was raised by, and a note.

    A matrix may be gigabytes: each is let go as soon as the next is made of it.
    """
    mean, largest = float(ordered.diagonal().mean()), float(ordered.diagonal().max())
    raises = [(DAMP * mean, "")]
    raises += [(d * mean, f"diagonal raised by {d:g} of its mean") for d in (1.0, 10.0)]
    raises += [(f * largest, f"diagonal raised by {f:g} of its largest entry") for f in _FLOORS]
    for raised, note in raises:
        damped = ordered.clone()
        damped.diagonal().add_(raised)
        factor, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not bool(failed):
            inverse = torch.cholesky_inverse(factor)
            del factor
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(failed) and bool(factor.isfinite().all()):
                return factor, raised, note
    return None, 0.0, "rounded to nearest: the inputs' second moments cannot be inverted"
