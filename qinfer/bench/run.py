"""Drives an engine through a list of requests and writes down what each step did.

`continuous` is what the engine is for: a sequence that ends makes room for the next at once. `static` is
what it replaces: a batch is filled, and the next begins when its longest answer is done; until then the rows
of shorter ones are computed for nothing, as a loop over a fixed batch of tensors does. Only what was asked
for counts as output in either.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from qinfer.bench.dataset import BenchRequest
from qinfer.bench.roofline import Work
from qinfer.engine.engine import Engine
from qinfer.outputs import RequestOutput
from qinfer.progress import ProgressBar
from qinfer.sampling_params import RequestOutputKind, SamplingParams

SCHEDULINGS = ("continuous", "static")


@dataclass
class Measured:
    """What a run took and did; times in seconds, `occupancy` one number of sequences per step."""

    elapsed: float = 0.0
    work: list[Work] = field(default_factory=list)
    occupancy: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)  # since the start of the request's batch
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens that were asked for."""
        return sum(item.n * item.output_len for item in self.work)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, cached ones too."""
        return sum(item.prompt_len for item in self.work)


class Driver:
    """Runs requests on an idle engine, with answers of exactly the lengths asked for."""

    def __init__(self, engine: Engine, *, n: int = 1, temperature: float = 1.0, detokenize: bool = True):
        self._engine = engine
        self._ids = count()
        self._params = SamplingParams(
            n=n,
            temperature=temperature,
            ignore_eos=True,
            detokenize=detokenize,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def run(
        self, requests: Sequence[BenchRequest], scheduling: str = "continuous", *, progress: bool = False
    ) -> Measured:
        """Runs them all and returns what was measured; raises UserError where one can never fit."""
        assert scheduling in SCHEDULINGS, scheduling
        bar = ProgressBar(progress, len(requests) * self._params.n) if progress else None
        try:
            return self._run(requests, scheduling, bar)
        finally:
            if bar:
                bar.close()

    def _run(self, requests: Sequence[BenchRequest], scheduling: str, bar: ProgressBar | None) -> Measured:
        measured = Measured()
        before = self._engine.stats()
        start = time.perf_counter()
        for batch in self._batches(requests, scheduling):
            longest = max(request.output_len for request in batch) if scheduling == "static" else None
            self._run_batch(batch, longest, measured, bar)
        measured.elapsed = time.perf_counter() - start
        after = self._engine.stats()
        measured.preemptions = after.num_preemptions - before.num_preemptions
        measured.prefix_queries = after.prefix_queries - before.prefix_queries
        measured.prefix_hits = after.prefix_hits - before.prefix_hits
        return measured

    def _batches(self, requests: Sequence[BenchRequest], scheduling: str) -> list[Sequence[BenchRequest]]:
        size = len(requests)
        if scheduling == "static":
            size = max(1, self._engine.limits.max_num_seqs // self._params.n)
        return [requests[i : i + size] for i in range(0, len(requests), size)]

    def _run_batch(
        self,
        batch: Sequence[BenchRequest],
        longest: int | None,
        measured: Measured,
        bar: ProgressBar | None,
    ) -> None:
        engine, asked = self._engine, {}
        start = time.perf_counter()
        began = time.monotonic()
        for request in batch:
            params = self._params.clone()
            params.max_tokens = request.output_len if longest is None else longest
            asked[request_id := f"bench-{next(self._ids)}"] = request
            engine.add(request_id, request.prompt, params)
        while engine.has_unfinished():
            for output in engine.step():
                measured.work.append(self._work(asked[output.request_id], output))
                assert output.metrics is not None
                measured.first_tokens.append(output.metrics.first_token_ts - began)
                if bar:
                    bar.advance(output)
            now = time.perf_counter()
            measured.steps.append(now - start)
            measured.occupancy.append(engine.stats().num_running)
            start = now

    def _work(self, request: BenchRequest, output: RequestOutput) -> Work:
        for answer in output.outputs:
            if len(answer.token_ids) < request.output_len:  # nothing may stop it: the engine broke
                raise RuntimeError(
                    f"{output.request_id} ended ({answer.finish_reason}) after {len(answer.token_ids)} of "
                    f"{request.output_len} tokens"
                )
        cached = min(output.num_cached_tokens or 0, len(request.prompt) - 1)
        return Work(len(request.prompt), request.output_len, self._params.n, cached)
