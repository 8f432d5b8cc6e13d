"""From a plan of ints to a step's tensors.

What a lane's sequence has in pages is kept here from step to step, so that a step of many sequences costs a
few array operations. All numbers of a step lie in one array; on a GPU it is pinned and goes over in one copy
that nobody waits for. A token that is not known yet is -1 there, and taken on the device from the place where
the step before leaves what it samples.

Small steps on a GPU are padded to few shapes and lie at fixed places: `buffers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qinfer import ops
from qinfer.engine.options import StepLimits
from qinfer.engine.plan import Chunk, StepPlan
from qinfer.engine.sampler import Draw

Ints: TypeAlias = "np.ndarray[Any, Any]"

UNKNOWN = -1  # instead of a token id


class StepInputs(NamedTuple):
    """One step's tensors, int64: T tokens of B chunks, in the plan's order."""

    token_ids: Tensor  # [T], UNKNOWN: the last of the token's lane
    positions: Tensor  # [T], within each sequence
    slots: Tensor  # [T]: page * PAGE + offset
    batch: ops.PagedBatch
    lanes: Tensor  # [T]; of padded rows: max_num_seqs
    sample_rows: Tensor | None  # rows of [T] whose next token is to be chosen; None: all, padded ones too
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
    def row_lanes(self) -> Ints:
        """The lane of every token."""
        return self.lanes if self.is_decode else np.repeat(self.lanes, np.diff(self.query_starts))

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token whose successor is to be chosen."""
        return len(self.token_ids) == len(self.lanes) == len(self.sample_rows)


def step_arrays(plan: StepPlan, token_ids: Mapping[int, Sequence[int]], tables: Tables) -> StepArrays:
    """Ints of a plan that has at least one chunk; `token_ids` by sequence, of those that are not pending."""
    count = len(plan.chunks)
    fields = len(Chunk._fields)
    numbers = np.fromiter(chain.from_iterable(plan.chunks), np.int64, count * fields)
    _, starts, stops, sample, lanes, pending = numbers.reshape(count, fields).T.copy()
    for lane, pages in plan.pages.items():
        tables.pages[lane, : len(pages)] = pages
    lengths = stops - starts
    query_starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_starts[1:])
    owner, positions = lanes, starts
    if query_starts[-1] > count:
        owner = np.repeat(lanes, lengths)
        positions = np.arange(query_starts[-1]) + np.repeat(stops - query_starts[1:], lengths)
    ids = np.full(len(positions), UNKNOWN, dtype=np.int64)
    for i in (pending == 0).nonzero()[0]:
        known = token_ids[plan.chunks[i].seq_id][starts[i] : stops[i]]
        ids[query_starts[i] : query_starts[i + 1]] = known
    size = tables.page_size
    slots = tables.pages[owner, positions // size] * size + positions % size
    sample_rows = (query_starts[1:] - 1)[sample == 1]
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
        arrays.row_lanes,
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
