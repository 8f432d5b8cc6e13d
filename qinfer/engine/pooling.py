"""One vector for a whole text, from the hidden states of its tokens.

A request that is pooled runs like one whose prompt is scored: its rows come chunk by chunk, none from the
prefix cache, and the one token that is sampled at the end means nothing. The vector has length 1, so that
dot products are cosines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qinfer.checkpoint.files import read_json

Pooling = Literal["mean", "last"]


def pooling_of(folder: Path) -> Pooling:
    """How a model's folder wants rows to become one vector; NotImplementedError for another way."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    raw = read_json(path)
    modes = {name.removeprefix("pooling_mode_") for name, value in raw.items() if value is True}
    if (named := raw.get("pooling_mode")) is not None:
        modes = {named} if isinstance(named, str) else set(named)
    if modes & {"lasttoken"}:
        return "last"
    if modes & {"mean", "mean_tokens"}:
        return "mean"
    raise NotImplementedError(f"qinfer does not have the pooling of {path.name}: {', '.join(sorted(modes))}")


class Pool:
    """Collects the rows of one prompt: their mean, or the last one."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self.num_rows = 0
        self._sum: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        """Takes the next rows [rows, H]."""
        self.num_rows += len(hidden)
        rows = hidden[-1].float() if self.pooling == "last" else hidden.float().sum(0)
        self._sum = rows if self._sum is None or self.pooling == "last" else self._sum + rows

    def restart(self) -> None:
        """Forgets all rows: they will come again."""
        self.num_rows, self._sum = 0, None

    def vector(self) -> list[float]:
        """The pooled row, [H] of length 1."""
        assert self._sum is not None, "asked for after the last row"
        found: list[float] = torch.nn.functional.normalize(self._sum, dim=0).tolist()
        return found
