"""Where the tensors of padded steps lie: steps of one shape differ by their contents only.

So one CUDA graph can be captured for each shape (`plan.shapes`). A decode step's shape is a number of
sequences, each with one row; a padded one has length zero. A step with prompts has the shape of its number of
tokens and has room for all sequences; padded ones have no rows, and padded rows no sequence. Either way
padding reads no page and writes to page 0, which nobody has; what comes out of padded rows may be anything.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from qinfer import ops
from qinfer.engine.inputs import Ints, StepArrays, StepInputs, Tables
from qinfer.engine.options import StepLimits
from qinfer.engine.pinned import Pinned
from qinfer.engine.plan import Shape, shapes
from qinfer.engine.sampler import Draw

_BY_TOKEN, _BY_SEQUENCE = 4, 8  # rows of numbers
_SMALL = 4096  # page numbers: up to here whole rows arrive, and a launch is saved
Numbers = TypeVar("Numbers", Tensor, Ints)


class StepBuffers:
    """Tensors for steps of all shapes, one at a time; what a step needs arrives in one copy."""

    def __init__(self, tables: Tables, limits: StepLimits, device: torch.device) -> None:
        num_lanes, max_pages = tables.pages.shape
        longest = max(shapes(limits)).num_tokens
        self._tables = tables
        # rows of even lengths, so that all begin at multiples of 16 bytes
        self._widths = longest + longest % 2, num_lanes + num_lanes % 2
        self._one_by_one = np.arange(self._widths[1])
        fixed = _BY_TOKEN * self._widths[0] + _BY_SEQUENCE * self._widths[1]
        self._arriving = torch.zeros(fixed + num_lanes * max_pages, dtype=torch.int64, device=device)
        self._table = torch.zeros(num_lanes, max_pages, dtype=torch.int64, device=device)
        self._max_pages = max_pages
        self._fixed = fixed
        self._by_token, self._by_sequence = self._parts(self._arriving)
        self._pinned = Pinned(device)
        self._inputs: dict[Shape, StepInputs] = {}  # of steps that sample all rows, and draw none

    def inputs(self, shape: Shape, num_sampled: int | None = None, *, drawn: bool = False) -> StepInputs:
        """The tensors of a step of that shape; `num_sampled` rows are to be sampled, None: all."""
        found = self._inputs.get(shape)
        if found is None:
            token_ids, positions, slots, lanes = self._by_token[:, : shape.num_tokens]
            batch = ops.PagedBatch(
                self._arrived_table(shape) if self._is_small(shape) else self._table[: shape.num_seqs],
                self._by_sequence[0, : shape.num_seqs],
                self._by_sequence[1, : shape.num_seqs + 1],
            )
            found = self._inputs[shape] = StepInputs(token_ids, positions, slots, batch, lanes, None, None)
        if num_sampled is not None:
            found = found._replace(sample_rows=self._by_sequence[2, :num_sampled])
        if drawn:
            num_drawn = shape.num_tokens if num_sampled is None else num_sampled
            found = found._replace(draw=self._by_sequence[3:, :num_drawn].view(torch.float64))
        return found

    def sampled(self, shape: Shape) -> Tensor | None:
        """Rows of a step of that shape that are to be sampled, padded with row 0; None: all."""
        return None if shape.decodes else self._by_sequence[2, : shape.num_seqs]

    def clear(self) -> None:
        """Leaves nothing but padding, which suits every shape; what a step leaves suits its own alone."""
        self._arriving.zero_()
        self._table.zero_()

    def fill(self, arrays: StepArrays, draw: Draw | None, shape: Shape) -> StepInputs:
        """Copies a step over without waiting, padded to `shape`."""
        count = len(arrays.lanes)
        width = self._max_pages if self._is_small(shape) else arrays.width
        size = self._fixed + shape.num_seqs * width
        pinned = self._pinned.empty(size)
        numbers: Ints = pinned.numpy()
        self._write(numbers, arrays, draw, shape.num_tokens)
        table = numbers[self._fixed :].reshape(-1, width)
        table[:count] = self._tables.pages[arrays.lanes, :width]
        table[count:] = 0
        ops.bring(pinned, self._arriving, _BY_TOKEN, self._widths[0], shape.num_tokens)
        self._pinned.keep(pinned)
        if not self._is_small(shape):
            self._table[: shape.num_seqs, :width].copy_(self._arriving[self._fixed : size].view(-1, width))
        num_sampled = None if arrays.is_decode else len(arrays.sample_rows)
        return self.inputs(shape, num_sampled, drawn=draw is not None)

    def _is_small(self, shape: Shape) -> bool:
        return shape.num_seqs * self._max_pages <= _SMALL

    def _arrived_table(self, shape: Shape) -> Tensor:
        size = shape.num_seqs * self._max_pages
        return self._arriving[self._fixed : self._fixed + size].view(-1, self._max_pages)

    def _write(self, numbers: Ints, arrays: StepArrays, draw: Draw | None, num_tokens: int) -> None:
        by_token, by_sequence = self._parts(numbers)
        by_token = by_token[:, :num_tokens]  # no step of the shape looks farther
        count = len(arrays.lanes)
        by_token[:] = by_sequence[:] = 0
        rows: tuple[Ints, ...] = arrays.token_ids, arrays.positions, arrays.slots, arrays.row_lanes
        for target, source in zip(by_token, rows, strict=True):
            target[: len(source)] = source
        by_token[3, len(arrays.token_ids) :] = len(self._tables.pages) - 1  # nobody's lane
        by_sequence[0, :count] = arrays.seq_lens
        if arrays.is_decode:
            by_sequence[1] = self._one_by_one
        else:
            by_sequence[1, : count + 1] = arrays.query_starts
            by_sequence[1, count + 1 :] = arrays.query_starts[-1]
            by_sequence[2, : len(arrays.sample_rows)] = arrays.sample_rows
        if draw is not None:
            by_sequence[3:, : draw.rows.shape[1]] = draw.rows.view(np.int64)

    def _parts(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Views of the beginning of `numbers` as [4, tokens] and [8, sequences + 1]."""
        middle = _BY_TOKEN * self._widths[0]
        by_sequence = numbers[middle : self._fixed].reshape(_BY_SEQUENCE, -1)
        return numbers[:middle].reshape(_BY_TOKEN, -1), by_sequence
