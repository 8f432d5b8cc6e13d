"""The requests of one `LLM`: several methods take them in, and whoever waits for some steps them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from qinfer.engine.continuation import Continuation
from qinfer.engine.engine import Engine
from qinfer.engine.pooling import Pooling
from qinfer.errors import UserError
from qinfer.outputs import RequestOutput
from qinfer.progress import Progress, ProgressBar
from qinfer.sampling_params import RequestOutputKind, SamplingParams


class Requests:
    """Numbers requests, runs them, and keeps outputs for who asks for them later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = count()
        self._finished: dict[str, RequestOutput] = {}
        self._widths: dict[str, int] = {}  # n of each request, for the progress bar

    def add(
        self,
        prompts: Iterable[tuple[str | None, Sequence[int]]],
        params: Sequence[SamplingParams],
        *,
        pooling: Pooling | None = None,
        priority: Sequence[int] | None = None,
        continuations: Sequence[Continuation] | None = None,
    ) -> list[str]:
        """Takes in a request for each of `params`, of which `prompts` are text and ids; returns their ids.

        All or none: where one cannot be run, those before it are taken out, and its error is raised.
        """
        ranks = [0] * len(params) if priority is None else priority
        if len(ranks) != len(params):
            raise UserError(f"{len(params)} prompts but {len(ranks)} priorities: give one each", "priority")
        ids: list[str] = []
        try:
            for i, ((text, token_ids), own, rank) in enumerate(zip(prompts, params, ranks, strict=True)):
                final = own.clone()
                final.output_kind = RequestOutputKind.FINAL_ONLY
                request_id = str(next(self._ids))
                self._engine.add(
                    request_id,
                    token_ids,
                    final,
                    prompt=text,
                    priority=rank,
                    pooling=pooling,
                    continuation=continuations[i] if continuations else None,
                )
                ids.append(request_id)
                self._widths[request_id] = own.n
        except BaseException:
            self._abort(ids)
            raise
        return ids

    def run(self, ids: Sequence[str], use_tqdm: Progress) -> list[RequestOutput]:
        """Steps until these have finished and returns their outputs; those of others are kept."""
        missing = {request_id for request_id in ids if request_id not in self._finished}
        total = sum(self._widths.pop(request_id) for request_id in ids)
        bar = ProgressBar(use_tqdm, total) if use_tqdm else None
        try:
            while missing:
                for output in self._engine.step():
                    self._finished[output.request_id] = output
                    if bar and output.request_id in missing:
                        bar.advance(output)
                    missing.discard(output.request_id)
        except BaseException:  # also an interrupt: what nobody waits for any more must not run on
            self._abort(missing)
            raise
        finally:
            if bar:
                bar.close()
        return [self._finished.pop(request_id) for request_id in ids]

    def _abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)
