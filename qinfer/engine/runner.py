"""From a plan of ints to logits or tokens: makes the step's tensors, runs the decoder over the pages.

All chunks of a step lie one after the other in one row of tokens; decode is a chunk of length one.
`PagedAttend` is what the decoder calls in every layer: it writes the layer's K and V into their slots, then
attends through the pages.

`run` gives logits, for whoever has more to do with them. `launch` chooses the tokens as well and waits for
nothing: they stay on the device, where the next step finds them, and come to the host on the way. On a GPU
all steps go one after the other through one stream; that order is what makes it safe to plan ahead.

Small steps on a GPU are padded to a few shapes (`plan.shapes`) and replayed as CUDA graphs where those were
captured (`graphs.py`). Without them the same kernels run with the same padding: the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qinfer import backend, ops
from qinfer.engine.buffers import StepBuffers
from qinfer.engine.graphs import StepGraphs
from qinfer.engine.inputs import StepInputs, Tables, step_arrays, step_inputs
from qinfer.engine.kv_pool import KVPool
from qinfer.engine.options import StepLimits
from qinfer.engine.pinned import Pinned
from qinfer.engine.plan import Shape, StepPlan, shape_of
from qinfer.engine.sampler import Draw, choose
from qinfer.model.decoder import Decoder
from qinfer.model.heads import Heads

TokenIds = Mapping[int, Sequence[int]]  # of each sequence, as far as they are known


class StepOutput(NamedTuple):
    """`logits` [S, V] float32 of sampled chunks; `hidden` [rows, H] of all rows of the chunks asked for."""

    logits: Tensor
    hidden: Mapping[int, Tensor]


class _Computed(NamedTuple):
    """Hidden states after the final norm [T, H] of a step, and the shape of the graph that made them.

    Or only those of its sampled rows; then `inputs` say that all are.
    """

    hidden: Tensor
    inputs: StepInputs
    replayed: Shape | None
    num_sampled: int


class Launched(Protocol):
    """A step that is under way."""

    def tokens(self) -> list[int]:
        """Tokens of the sampled chunks, in the plan's order, -1 for NaN; waits for the step."""
        ...


class StepRunner(Protocol):
    """What the engine needs of a model; `testing.FakeRunner` is the other one."""

    overlaps: bool  # whether the next step is to be planned and launched while one runs

    def run(self, plan: StepPlan, token_ids: TokenIds, keep: frozenset[int] = frozenset()) -> StepOutput:
        """Runs a plan; `token_ids` by sequence id; hidden rows are kept for the sequences in `keep`."""
        ...

    def launch(self, plan: StepPlan, token_ids: TokenIds, draw: Draw | None) -> Launched:
        """Starts a plan and the choice of its tokens; `draw` is None where all are greedy."""
        ...

    def logits(self, hidden: Tensor, *, to_compare: bool = False) -> Tensor:
        """Kept rows [rows, H] -> [rows, V] float32, or of the model's dtype if only `to_compare`."""
        ...


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
        geometry = ops.Geometry(heads.num_kv_heads, self._pool.page_size, window, heads.dtype)
        if geometry not in self._known:
            places = ops.kv_places(self._slots, geometry)
            self._known[geometry] = places, ops.group_rows(self._batch, geometry)
        places, groups = self._known[geometry]
        q = heads.into_pages(pages, places)
        return ops.paged_attention(q, pages, groups, scale=scale, softcap=softcap)


class Arriving:
    """Tokens [S] that are on the host once `event` has come; None: now."""

    def __init__(self, ids: Tensor, event: torch.cuda.Event | None = None) -> None:
        self._ids = ids
        self._event = event

    def tokens(self) -> list[int]:
        """As in `Launched`."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._ids.tolist()
        return found


class Runner:
    """A decoder with its pages; `graphs` is None until `graphs.capture` made them."""

    def __init__(self, decoder: Decoder, pool: KVPool, limits: StepLimits) -> None:
        self.decoder = decoder
        self.pool = pool
        self.limits = limits
        self.overlaps = decoder.device.type != "cpu"
        self.graphs: StepGraphs | None = None
        self._tables = Tables(limits)
        self.buffers = StepBuffers(self._tables, limits, decoder.device) if self.overlaps else None
        # the last token of each lane, and of padded rows
        self._last = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=decoder.device)
        self._pinned = Pinned(decoder.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan, token_ids: TokenIds, keep: frozenset[int] = frozenset()) -> StepOutput:
        """Computes the plan's tokens, whose K and V are in the pages afterwards."""
        hidden, inputs, replayed, num_sampled = self._compute(plan, token_ids, None, whole=bool(keep))
        kept: dict[int, Tensor] = {}
        row = 0
        for chunk in plan.chunks if keep else ():
            stop = row + chunk.stop - chunk.start
            if chunk.seq_id in keep:
                kept[chunk.seq_id] = hidden[row:stop] if replayed is None else hidden[row:stop].clone()
            row = stop
        return StepOutput(self._sampled_logits(hidden, inputs)[:num_sampled], kept)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, token_ids: TokenIds, draw: Draw | None) -> Arriving:
        """As `run`, and chooses the tokens; nothing waits for the device."""
        hidden, inputs, replayed, num_sampled = self._compute(plan, token_ids, draw)
        if replayed is not None and self.graphs is not None and replayed.decodes and draw is None:
            ids = self.graphs.greedy(replayed)
        else:
            ids = self.choose(hidden, inputs, limited=draw is not None and draw.limited)
        host = self._pinned.empty(num_sampled)
        lanes = inputs.lanes if inputs.sample_rows is None else inputs.lanes[inputs.sample_rows]
        ops.keep_ids(ids, lanes, self._last, host)
        return Arriving(host, self._pinned.keep(host))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, to_compare: bool = False) -> Tensor:
        """Kept rows [rows, H] -> [rows, V] float32, or of the model's dtype if only `to_compare`."""
        return self.decoder.logits(hidden, to_compare=to_compare)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """A step's tensors -> hidden states after the final norm [T, H], or only of `rows`.

        Unknown tokens are written into the tensors.
        """
        ops.put_known_ids(inputs.token_ids, self._last, inputs.lanes)
        attend = PagedAttend(self.pool, inputs.slots, inputs.batch)
        return self.decoder.forward(inputs.token_ids, inputs.positions, attend, rows)

    def forward_padded(self, shape: Shape) -> Tensor:
        """The step in the buffers -> hidden states after the final norm of its sampled rows [S, H]."""
        assert self.buffers is not None
        return self.forward(self.buffers.inputs(shape), self.buffers.sampled(shape))

    @torch.inference_mode()
    def choose(self, hidden: Tensor, inputs: StepInputs, *, limited: bool = False) -> Tensor:
        """Tokens [S] of a step's sampled rows, -1 for NaN."""
        logits = self._sampled_logits(hidden, inputs, to_compare=inputs.draw is None)
        return choose(logits, inputs.draw, limited=limited)

    def _compute(
        self, plan: StepPlan, token_ids: TokenIds, draw: Draw | None, *, whole: bool = False
    ) -> _Computed:
        """`whole`: hidden states of all rows are wanted, not of the sampled ones alone."""
        arrays = step_arrays(plan, token_ids, self._tables)
        shape, num_sampled = None, len(arrays.sample_rows)
        if self.buffers is not None and backend.runs_kernels():
            num_tokens, num_seqs = len(arrays.token_ids), len(arrays.lanes)
            shape = shape_of(num_tokens, num_seqs, self.limits, decodes=arrays.is_decode)
        if self.buffers is None or shape is None:
            inputs = step_inputs(arrays, self._tables, draw, self.decoder.device)
            return self._unpadded(inputs, num_sampled, whole)
        inputs = self.buffers.fill(arrays, draw, shape)
        if whole and not shape.decodes:
            return _Computed(self.forward(inputs), inputs, None, num_sampled)
        hidden = self.forward_padded(shape) if self.graphs is None else self.graphs.replay(shape)
        if not shape.decodes:
            hidden, inputs = hidden[:num_sampled], _of_sampled(inputs)
        return _Computed(hidden, inputs, None if self.graphs is None else shape, num_sampled)

    def _unpadded(self, inputs: StepInputs, num_sampled: int, whole: bool) -> _Computed:
        """A step whose last layer ends with the sampled rows alone: of 32, nearly a 32nd of the work less.

        Not on a CPU, which computes one row otherwise than many: there what a text begins with would depend
        on who begins beside it.
        """
        rows = inputs.sample_rows
        if rows is None or whole or not num_sampled or not rows.is_cuda:
            return _Computed(self.forward(inputs), inputs, None, num_sampled)
        return _Computed(self.forward(inputs, rows), _of_sampled(inputs), None, num_sampled)

    def _sampled_logits(self, hidden: Tensor, inputs: StepInputs, *, to_compare: bool = False) -> Tensor:
        """Of a decode step's padded rows too."""
        rows = hidden if inputs.sample_rows is None else hidden[inputs.sample_rows]
        return self.decoder.logits(rows, to_compare=to_compare)


def _of_sampled(inputs: StepInputs) -> StepInputs:
    """What is left to know of a step of which only the rows to be sampled came out."""
    return inputs._replace(lanes=inputs.lanes[inputs.sample_rows], sample_rows=None)
