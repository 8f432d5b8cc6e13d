"""From a plan of ints to a step's tensors.

What a lane's sequence has in pages is kept here from step to step, so that a step of many sequences costs a
few array operations. All numbers of a step lie in one array; on a GPU it is pinned and goes over in one copy
that nobody waits for. A token that is not known yet is -1 there, and taken on the device from the place where
the step before leaves what it samples.

Decode steps are padded to few sizes, `bucket`, for each of which one CUDA graph can be captured: their
tensors lie at fixed places (`DecodeBuffers`). A padded row has length zero, so it reads nothing, and writes
to page 0, which nobody has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qinfer import ops
from qinfer.engine.options import StepLimits
from qinfer.engine.plan import StepPlan
from qinfer.engine.sampler import Draw

Ints: TypeAlias = "np.ndarray[Any, Any]"

UNKNOWN = -1  # instead of a token id
_FINE, _COARSE, _FINE_UP_TO = 8, 16, 256  # steps between sizes of decode steps


class StepInputs(NamedTuple):
    """One step's tensors, int64: T tokens of B chunks, in the plan's order."""

    token_ids: Tensor  # [T], UNKNOWN: the last of the token's lane
    positions: Tensor  # [T], within each sequence
    slots: Tensor  # [T]: page * PAGE + offset
    batch: ops.PagedBatch
    lanes: Tensor  # [T]; of padded rows: max_num_seqs
    sample_rows: Tensor | None  # rows of [T] whose next token is to be chosen; None: all
    draw: Tensor | None  # [5, S] float64, of a `Draw`


class Tables:
    """The pages of each lane's sequence, on the host: int64 [max_num_seqs + 1, max_pages], row -1 is 0."""

    def __init__(self, limits: StepLimits) -> None:
        self.page_size = limits.block_size
        self.pages = np.zeros(
            (limits.max_num_seqs + 1, -(-limits.max_model_len // limits.block_size)), np.int64
        )


class StepArrays(NamedTuple):
    """A step in ints, as `StepInputs`; its page table is `pages[lanes, :width]`."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    seq_lens: Ints
    query_starts: Ints
    lanes: Ints  # [B]
    sample_rows: Ints
    width: int

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token whose successor is to be chosen."""
        return len(self.token_ids) == len(self.lanes) == len(self.sample_rows)


def bucket(count: int, largest: int) -> int:
    """The size to which a decode step of `count` sequences is padded, at most `largest`."""
    if count > _FINE // 2:
        step = _FINE if count <= _FINE_UP_TO else _COARSE
        size = -(-count // step) * step
    else:
        size = 1 << (count - 1).bit_length()
    return min(size, largest)


def buckets(largest: int) -> list[int]:
    """All sizes of decode steps, the largest first."""
    return sorted({bucket(count, largest) for count in range(1, largest + 1)}, reverse=True)


def step_arrays(plan: StepPlan, token_ids: Mapping[int, Sequence[int]], tables: Tables) -> StepArrays:
    """Ints of a plan that has at least one chunk; `token_ids` by sequence, of those that are not pending."""
    count = len(plan.chunks)
    _, *columns = zip(*plan.chunks, strict=True)  # Chunk's fields
    pages = columns.pop(2)
    starts, stops, lanes = (np.fromiter(columns[i], np.int64, count) for i in (0, 1, 3))
    sample, pending, new_pages = (np.fromiter(columns[i], np.bool_, count) for i in (2, 4, 5))
    for i in new_pages.nonzero()[0]:
        tables.pages[lanes[i], : len(pages[i])] = pages[i]
    lengths = stops - starts
    query_starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_starts[1:])
    owner, positions = lanes, starts
    if query_starts[-1] > count:
        owner = np.repeat(lanes, lengths)
        positions = np.arange(query_starts[-1]) + np.repeat(stops - query_starts[1:], lengths)
    ids = np.full(len(positions), UNKNOWN, dtype=np.int64)
    for i in (~pending).nonzero()[0]:
        known = token_ids[plan.chunks[i].seq_id][starts[i] : stops[i]]
        ids[query_starts[i] : query_starts[i + 1]] = known
    size = tables.page_size
    slots = tables.pages[owner, positions // size] * size + positions % size
    sample_rows = (query_starts[1:] - 1)[sample]
    width = -(-int(stops.max()) // size)
    return StepArrays(ids, positions, slots, stops, query_starts, lanes, sample_rows, width)


def step_inputs(arrays: StepArrays, tables: Tables, draw: Draw | None, device: torch.device) -> StepInputs:
    """Tensors of a step of any kind, not padded."""
    lanes = arrays.lanes
    all_sampled = len(arrays.sample_rows) == len(arrays.token_ids)
    parts: list[Ints] = [
        arrays.token_ids,
        arrays.positions,
        arrays.slots,
        tables.pages[lanes, : arrays.width],
        arrays.seq_lens,
        arrays.query_starts,
        np.repeat(lanes, np.diff(arrays.query_starts)),
        arrays.sample_rows,
    ]
    if draw is not None:
        parts.append(draw.rows.view(np.int64))
    moved = _on_device(parts, device)
    drawn = moved.pop().view(torch.float64) if draw is not None else None
    token_ids, positions, slots, *batch, row_lanes, sample_rows = moved
    rows = None if all_sampled else sample_rows
    return StepInputs(token_ids, positions, slots, ops.PagedBatch(*batch), row_lanes, rows, drawn)


def _on_device(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """int64 arrays as tensors; to a GPU in one copy, each beginning at a multiple of 16 bytes there."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(array.size + array.size % 2 for array in arrays)]).tolist()
    pinned = torch.empty(starts[-1], dtype=torch.int64, pin_memory=True)
    together = pinned.numpy()
    for array, start in zip(arrays, starts, strict=False):
        together[start : start + array.size] = array.ravel()
    moved = pinned.to(device, non_blocking=True)
    return [
        moved[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


class DecodeBuffers:
    """Where the tensors of padded decode steps lie: steps of one size differ by their contents only."""

    def __init__(self, tables: Tables, device: torch.device) -> None:
        num_lanes, max_pages = tables.pages.shape
        self._tables = tables
        self._row = num_lanes + num_lanes % 2  # words: one more than sequences, so that rows are aligned
        self._arriving = torch.zeros(11 * self._row + num_lanes * max_pages, dtype=torch.int64, device=device)
        self._numbers = self._arriving[: 11 * self._row].view(11, -1)
        self._table = torch.zeros(num_lanes, max_pages, dtype=torch.int64, device=device)

    def inputs(self, size: int, *, drawn: bool = False) -> StepInputs:
        """The tensors of a step of `size` rows."""
        token_ids, positions, slots, seq_lens, lanes = self._numbers[:5, :size]
        batch = ops.PagedBatch(self._table[:size], seq_lens, self._numbers[5, : size + 1])
        draw = self._numbers[6:, :size].view(torch.float64) if drawn else None
        return StepInputs(token_ids, positions, slots, batch, lanes, None, draw)

    def fill(self, arrays: StepArrays, draw: Draw | None, size: int) -> StepInputs:
        """Copies a decode step over without waiting, padded to `size` rows."""
        count, width, fixed = len(arrays.lanes), arrays.width, self._numbers.numel()
        pinned = torch.empty(fixed + size * width, dtype=torch.int64, pin_memory=self._arriving.is_cuda)
        together = pinned.numpy()
        numbers, table = together[:fixed].reshape(11, -1), together[fixed:].reshape(size, width)
        numbers[:] = 0
        parts = (arrays.token_ids, arrays.positions, arrays.slots, arrays.seq_lens, arrays.lanes)
        for row, part in zip(numbers, parts, strict=False):
            row[:count] = part
        numbers[4, count:] = len(self._tables.pages) - 1
        numbers[5] = np.arange(self._row)
        if draw is not None:
            numbers[6:, :count] = draw.rows.view(np.int64)
        table[:count] = self._tables.pages[arrays.lanes, :width]
        table[count:] = 0
        self._arriving[: len(pinned)].copy_(pinned, non_blocking=True)
        self._table[:size, :width].copy_(self._arriving[fixed : len(pinned)].view(size, width))
        return self.inputs(size, drawn=draw is not None)
