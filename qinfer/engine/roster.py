"""Who is in the engine: requests by their names, and by numbers the sequences that are not done. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

from qinfer.engine.plan import StepPlan
from qinfer.engine.request import Request, Sequence
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from qinfer.engine.structured import Constraint


class Roster:
    """Requests from when they are taken in to when their last sequence ends."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.token_ids: dict[int, list[int]] = {}  # of these sequences
        self._numbers = count()
        self._may_look_back: set[str] = set()  # requests of which a sequence may

    def enter(self, request: Request, seed: int, constraints: Iterable[Constraint | None]) -> list[Sequence]:
        """Takes a request in and gives it a sequence for each constraint; the first draws by `seed`."""
        self.requests[request.request_id] = request
        if request.looks_back or request.rules.min_tokens:
            self._may_look_back.add(request.request_id)
        for index, constraint in enumerate(constraints):
            seq = Sequence(next(self._numbers), request, index, seed + index, list(request.prompt_ids))
            seq.constraint = constraint
            request.sequences.append(seq)
            self.sequences[seq.seq_id] = seq
            self.token_ids[seq.seq_id] = seq.token_ids
        return request.sequences

    def sequences_of(self, plan: StepPlan) -> list[Sequence]:
        """Those of a plan's chunks, stamped where it is their request's first step."""
        now = time.monotonic()
        sequences = [self.sequences[chunk.seq_id] for chunk in plan.chunks]
        for seq, chunk in zip(sequences, plan.chunks, strict=True):
            if not (chunk.pending or seq.request.metrics.scheduled_ts):
                seq.request.metrics.scheduled_ts = now
        return sequences

    def looks_back(self, sequences: Iterable[Sequence]) -> bool:
        """Whether one of them does; that none may is the rule, and known without asking each."""
        return bool(self._may_look_back) and any(seq.looks_back for seq in sequences)

    def strike(self, seq: Sequence) -> None:
        """Takes out a sequence that has ended, with its request where it was the last."""
        self.sequences.pop(seq.seq_id, None)
        self.token_ids.pop(seq.seq_id, None)
        if seq.request.finished:
            self.requests.pop(seq.request.request_id, None)
            self._may_look_back.discard(seq.request.request_id)


def outputs_of(changed: Iterable[Sequence]) -> list[RequestOutput]:
    """What the requests of these sequences have to show now; FINAL_ONLY ones show nothing but their end."""
    final = RequestOutputKind.FINAL_ONLY
    requests = dict.fromkeys(
        seq.request
        for seq in changed
        if seq.finish_reason is not None or seq.request.params.output_kind is not final
    )
    return [
        request.output()
        for request in requests
        if request.params.output_kind is not final or request.finished
    ]
