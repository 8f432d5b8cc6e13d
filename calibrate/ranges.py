"""Narrower ranges for groups of weights: clip the few largest so that the rest are rounded more finely.

What a range is judged by (the names of `--ranges`):

    absmax    nothing: the full range is taken
    mse       the weights' own error, sum |w - Q(w)|^2.4 as GPTQ's and llm-compressor's observers have it
    imatrix   the same squared, each column weighted by its inputs' mean square, as llama.cpp's imatrix does
    output    the error of the output, sum over tokens of (x_g . (w_g - Q(w_g)))^2 for each row and group:
              with the group's second moments M = sum x_g x_g^T that is d^T M d, exact over every token seen

AWQ clips by `output`. Five widths, from 0.9 to half of the full range, are tried with both ends together,
then, for a grid with a zero point, each end around the best of them in steps of a tenth, and again of a
twentieth. These are 17 candidates; all twentieths down to 0.55, ends together and each alone, are 28 and left
a little more: 0.616 of the full ranges' error by `imatrix`, not 0.614 (14 linears of SmolLM2-135M). The full
range is always among the candidates, so no group ends up worse than without the search.

Moving groups one by one ignores that errors of different groups meet in one output; that is AWQ's choice too.
Its authors spare q and k, whose product passes through a softmax. Judged by second moments they gain like the
others: attention's squared error on other text fell from 0.0285 to 0.0277 and from 0.0159 to 0.0152 in two
layers of SmolLM2-135M after AWQ's scales, and from 0.116 to 0.056 without.

Rows are searched a few at a time, so that all that a candidate needs stays in a processor's cache; on a GPU
so many that it is busy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qinfer.calibrate.grid import Grid
from qinfer.quant import Ranges

RANGES = ("absmax", "mse", "imatrix", "output")
GridOf = Callable[[Ranges], Grid]
ErrorOf = Callable[[Tensor], Tensor]  # weight errors [groups, n, g], to be used up -> their cost [groups, n]

_WIDTHS = (0.9, 0.8, 0.7, 0.6, 0.5)  # of the full range
_MOVES = ((0.2, 0.1, -0.1, -0.2), (0.05, -0.05))  # of one end, then finer
_NORM = 2.4
CHUNKS = (1 << 17, 1 << 26)  # weights that a processor, and a GPU, search at a time


def full_ranges(weight: Tensor, group_size: int, *, symmetric: bool) -> Ranges:
    """The range of each group of `weight` [N, K], zero included: ([N, groups], [N, groups]), float32."""
    groups = weight.float().view(weight.shape[0], -1, group_size)
    if symmetric:
        high = groups.abs().amax(-1)
        return -high, high
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def weight_error(delta: Tensor) -> Tensor:
    """What `mse` judges by."""
    return delta.abs_().log_().mul_(_NORM).exp_().sum(-1)  # a fifth of the time of pow


def input_weighted_error(mean_squares: Tensor) -> ErrorOf:
    """What `imatrix` judges by, for mean squares [groups, g] of the inputs."""
    return lambda delta: delta.square_().mul_(mean_squares.unsqueeze(1)).sum(-1)


def output_error(moments: Tensor) -> ErrorOf:
    """What `output` judges by, for second moments [groups, g, g] of the inputs."""
    return lambda delta: (delta @ moments).mul_(delta).sum(-1)


def num_tries(*, symmetric: bool) -> int:
    """How many candidates a search looks at."""
    moves = len(_MOVES[-1]) if symmetric else 2 * sum(map(len, _MOVES))
    return 1 + len(_WIDTHS) + moves


def search_ranges(
    weight: Tensor, group_size: int, grid_of: GridOf, error_of: ErrorOf, *, symmetric: bool
) -> tuple[Ranges, float]:
    """The ranges with the least error, and that error as a share of the full ranges' (at most 1).

    `weight` is [N, K] float32; `grid_of` makes the grid of ranges of any shape.
    """
    rows = max(1, CHUNKS[weight.is_cuda] // weight.shape[1])
    lows, highs = [], []
    before = after = 0.0
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        groups = part.view(len(part), -1, group_size).transpose(0, 1).contiguous()
        search = _Search(groups, grid_of, error_of, symmetric=symmetric)
        before += float(search.error.sum())
        search.run()
        after += float(search.error.sum())
        low, high = search.ranges(search.low, search.high)
        lows.append(low.T)
        highs.append(high.T)
    return (torch.cat(lows), torch.cat(highs)), after / before if before > 0 else 1.0


class _Search:
    """The best ranges so far of weights [groups, n, g], and their `error`, [groups, n].

    `low` and `high` [groups, n] say how far the ends reach, as shares of the full range.
    """

    def __init__(self, weight: Tensor, grid_of: GridOf, error_of: ErrorOf, *, symmetric: bool) -> None:
        self.weight, self.grid_of, self.error_of, self.symmetric = weight, grid_of, error_of, symmetric
        full = full_ranges(weight.flatten(0, 1), weight.shape[-1], symmetric=symmetric)
        self._full = tuple(end.view(weight.shape[:2]) for end in full)
        self.low = self.high = torch.ones_like(self._full[0])
        self.error = self._error_of(self.low, self.high)

    def run(self) -> None:
        """Both ends together, then, where the grid has a zero point, one after the other."""
        for width in _WIDTHS:
            self._try(torch.full_like(self.low, width), torch.full_like(self.low, width))
        if self.symmetric:
            for end in self._near(self.high, _MOVES[-1]):
                self._try(end, end)
            return
        for moves in _MOVES:
            for end in self._near(self.low, moves):
                self._try(end, self.high)
            for end in self._near(self.high, moves):
                self._try(self.low, end)

    def ranges(self, low: Tensor, high: Tensor) -> Ranges:
        """What these shares of the full range are."""
        return self._full[0] * low, self._full[1] * high

    def _near(self, end: Tensor, moves: tuple[float, ...]) -> list[Tensor]:
        return [(end + move).clamp_(max=1.0) for move in moves]

    def _try(self, low: Tensor, high: Tensor) -> None:
        error = self._error_of(low, high)
        wins = error < self.error
        self.low, self.high = torch.where(wins, low, self.low), torch.where(wins, high, self.high)
        self.error = torch.where(wins, error, self.error)

    def _error_of(self, low: Tensor, high: Tensor) -> Tensor:
        grid = self.grid_of(self.ranges(low, high)).map(lambda x: x.unsqueeze(-1))
        return self.error_of(grid.nearest(self.weight).sub_(self.weight))
