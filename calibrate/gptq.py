"""GPTQ: rounds column by column and lets the columns to come make up for each error (arXiv 2210.17323).

With H = X^T X of the inputs and its Cholesky factor, H = L L^T, the squared error of the output of weights
w + d is |d L|^2, and column k of d L is

    L_kk (d_k + c_k)        c_k = sum over j > k of d_j L_jk / L_kk

So columns are taken from the last to the first, and each is given what those before it lack: w_k - c_k,
rounded. That is GPTQ's own choice, without its inverse of H (QuIP shows the two to be the same, arXiv
2307.13304). They are ordered by rising H_kk: the most used comes first, while nothing is yet to be made up
for. Scales belong to the groups of the original order and are fixed before ("static act-order"), so the file
needs no order. Columns of a block look at one another one by one, at those before the block in one product.

GPTQ never looks back: a column is rounded before anybody knows how the later ones will be. So a sweep of
coordinate descent on the same objective follows (QuantEase, arXiv 2309.01885): each column takes the value of
its grid that is best while all others stay, which can only lower the error: on random weights by 2 %, and a
second sweep by less than one more.

The diagonal of H is raised by a tenth of its mean. That makes H of few or alike tokens invertible, and it
keeps weights from being fitted to what these tokens have by chance: from c4 to technical text, a v_proj of
SmolLM2-135M kept 0.426 of the squared error of rounding to nearest, 0.448 with a hundredth, an up_proj 0.811
against 0.829. Where the factorization still fails more is added, then a floor relative to the largest entry;
if nothing helps, the weights are rounded to nearest and that is reported. A column that no token excites
takes no part, not in the mean either: it is rounded to nearest, and the others as they were without it.
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
    order = diagonal.argsort()
    ordered = gram[order][:, order]
    dead = diagonal[order] == 0
    used = ordered.diagonal()[~dead]
    mean = float(used.mean()) if len(used) else 1.0
    ordered.diagonal().masked_fill_(dead, mean)
    factor, note = _factor(ordered, mean)
    if factor is None:
        group_of = torch.arange(weight.shape[1], device=weight.device) // group_size
        return Rounded(grid.map(lambda x: x[:, group_of]).nearest(weight), note)
    original = weight.T[order].contiguous()  # a column of the weight is a row in memory
    columns = _grids(grid, (order // group_size).tolist())
    found = _in_turn(original, original, factor.div_(factor.diagonal().clone()), columns)
    del factor  # which may be gigabytes
    pivots = ordered.diagonal().clone().unsqueeze(1)
    couplings = ordered.div_(pivots).T
    for _ in range(SWEEPS):
        best = torch.addmm(found, couplings.T, original - found)  # of each column, all others as they are
        found = _in_turn(best, found, couplings, columns)
    rounded = torch.empty_like(found)
    rounded[order] = found
    return Rounded(rounded.T.contiguous(), note)


def _grids(grid: Grid, groups: list[int]) -> list[Grid]:
    """The grid of each column, entries [N], for a grid [N, groups]; columns of a group share it."""
    steps = grid.step.T.contiguous().unbind(0)
    zeros = [None] * len(steps) if grid.zero is None else grid.zero.T.contiguous().unbind(0)
    of_group = [Grid(step, zero, grid.bits) for step, zero in zip(steps, zeros, strict=True)]
    return [of_group[group] for group in groups]


def _in_turn(wanted: Tensor, before: Tensor, couplings: Tensor, grids: list[Grid]) -> Tensor:
    """Rounds rows to their grids from the last to the first, each for how those behind it moved.

    Row k [N] of what is returned is the value of grids[k] that is nearest to `wanted`_k + sum over j > k of
    (`before`_j - returned_j) `couplings`_jk, for tensors [K, N] and couplings [K, K].
    """
    rounded, moves = torch.empty_like(wanted), torch.zeros_like(wanted)
    for stop in range(len(wanted), 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        block = torch.addmm(wanted[start:stop], couplings[stop:, start:stop].T, moves[stop:])
        within = couplings[start:stop, start:stop].T.contiguous().unbind(0)  # a vector with gaps takes thrice
        known, rows = moves[start:stop].T, block.unbind(0)
        for k in range(stop - 1, start - 1, -1):
            rounded[k] = nearest = grids[k].nearest(rows[k - start].addmv_(known, within[k - start]))
            torch.sub(before[k], nearest, out=moves[k])
    return rounded


def _factor(ordered: Tensor, mean: float) -> tuple[Tensor | None, str]:
    """The lower Cholesky factor of a gram, whose diagonal is raised as far as need be, in place; a note.

    `mean` is that of the diagonal where columns are used.
    """
    diagonal = ordered.diagonal().clone()
    largest = float(diagonal.max())
    raises = [(DAMP * mean, "")]
    raises += [(d * mean, f"diagonal raised by {d:g} of its mean") for d in (1.0, 10.0)]
    raises += [(f * largest, f"diagonal raised by {f:g} of its largest entry") for f in _FLOORS]
    for raised, note in raises:
        ordered.diagonal().copy_(diagonal + raised)
        factor, failed = torch.linalg.cholesky_ex(ordered)
        if not bool(failed) and bool(factor.isfinite().all()):
            return factor, note
    return None, "rounded to nearest: the inputs' second moments cannot be inverted"
