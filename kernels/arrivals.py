"""A step's numbers on their way from the host to where the step's graph finds them."""

from __future__ import annotations

from torch import Tensor


def bring(numbers: Tensor, target: Tensor, rows: int, width: int, columns: int) -> None:
    """Copies numbers [N] int64 to the beginning of `target`: of the first [rows, width] only `columns`.

    On a GPU `numbers` are in pinned memory, which must stay as it is until the stream has come so far.
    """
    first = rows * width
    matrix = numbers[:first].view(rows, width)[:, :columns]
    target[:first].view(rows, width)[:, :columns].copy_(matrix, non_blocking=True)
    target[first : len(numbers)].copy_(numbers[first:], non_blocking=True)
