"""From a plan of ints to logits: makes the step's tensors, runs the decoder over the pages.

All chunks of a step lie one after the other in one row of tokens; decode is a chunk of length one, and
nothing here asks which is which. `PagedAttend` is what the decoder calls in every layer: it writes the
layer's K and V into their slots, then attends through the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qinfer import ops
from qinfer.engine.kv_pool import KVPool
from qinfer.engine.plan import StepPlan
from qinfer.model.decoder import Decoder
from qinfer.model.heads import Heads


class StepInputs(NamedTuple):
    """One step's tensors, int64: T tokens of B chunks."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], within each sequence
    slots: Tensor  # [T]: page * PAGE + offset
    batch: ops.PagedBatch
    sample_rows: Tensor  # rows of [T] whose next token is to be chosen, in the plan's order


class StepOutput(NamedTuple):
    """`logits` [S, V] float32 of sampled chunks; `hidden` [rows, H] of all rows of the chunks asked for."""

    logits: Tensor
    hidden: Mapping[int, Tensor]


class StepRunner(Protocol):
    """What the engine needs of a model; `testing.FakeRunner` is the other one."""

    def run(
        self, plan: StepPlan, token_ids: Mapping[int, Sequence[int]], keep: frozenset[int] = frozenset()
    ) -> StepOutput:
        """Runs a plan; `token_ids` by sequence id; hidden rows are kept for the sequences in `keep`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Kept rows [rows, H] -> [rows, V] float32."""
        ...


def step_inputs(
    plan: StepPlan, token_ids: Mapping[int, Sequence[int]], page_size: int, device: torch.device
) -> StepInputs:
    """Tensors of a plan that has at least one chunk."""
    chunks = plan.chunks
    ids = [token for c in chunks for token in token_ids[c.seq_id][c.start : c.stop]]
    lengths = np.array([c.stop - c.start for c in chunks])
    stops = np.array([c.stop for c in chunks])
    query_starts = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_starts[1:])
    table = np.zeros((len(chunks), max(len(c.pages) for c in chunks)), dtype=np.int64)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.pages)] = chunk.pages
    owner = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(len(ids)) + np.repeat(stops - query_starts[1:], lengths)
    slots = table[owner, positions // page_size] * page_size + positions % page_size
    last_rows = query_starts[1:] - 1
    arrays = (
        np.array(ids, dtype=np.int64),
        positions,
        slots,
        table,
        stops,
        query_starts,
        last_rows[[c.sample for c in chunks]],
    )
    token, position, slot, *batch, sample_rows = _on_device(arrays, device)
    return StepInputs(token, position, slot, ops.PagedBatch(*batch), sample_rows)


def _on_device(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """int64 arrays as tensors; to a GPU in one copy, each beginning at a multiple of 16 bytes there."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(array.size + array.size % 2 for array in arrays)])
    together = np.zeros(starts[-1], dtype=np.int64)
    for array, start in zip(arrays, starts, strict=False):
        together[start : start + array.size] = array.ravel()
    moved = torch.from_numpy(together).to(device)
    return [
        moved[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


class PagedAttend:
    """Attention of one step over the pages: the decoder's `Attend`."""

    def __init__(self, pool: KVPool, slots: Tensor, batch: ops.PagedBatch) -> None:
        self._pool = pool
        self._slots = slots
        self._batch = batch
        self._known: dict[ops.Geometry, tuple[Tensor, ops.Groups]] = {}

    def __call__(
        self,
        layer: int,
        heads: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        pages = self._pool.layers[layer]
        dtype = heads.projected.dtype
        geometry = ops.Geometry(heads.num_kv_heads, self._pool.page_size, window, dtype)
        if geometry not in self._known:
            places = ops.kv_places(self._slots, geometry)
            self._known[geometry] = places, ops.group_rows(self._batch, geometry)
        places, groups = self._known[geometry]
        q = heads.into_pages(pages, places)
        return ops.paged_attention(q, pages, groups, scale=scale, softcap=softcap)


class Runner:
    """A decoder with its pages."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self.decoder = decoder
        self.pool = pool

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, token_ids: Mapping[int, Sequence[int]], keep: frozenset[int] = frozenset()
    ) -> StepOutput:
        """Computes the plan's tokens, whose K and V are in the pages afterwards."""
        inputs = step_inputs(plan, token_ids, self.pool.page_size, self.decoder.device)
        attend = PagedAttend(self.pool, inputs.slots, inputs.batch)
        hidden = self.decoder.forward(inputs.token_ids, inputs.positions, attend)
        kept: dict[int, Tensor] = {}
        row = 0
        for chunk in plan.chunks:
            stop = row + chunk.stop - chunk.start
            if chunk.seq_id in keep:
                kept[chunk.seq_id] = hidden[row:stop]
            row = stop
        return StepOutput(self.decoder.logits(hidden[inputs.sample_rows]), kept)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Kept rows [rows, H] -> [rows, V] float32."""
        return self.decoder.logits(hidden)
