"""The numbers behind /metrics: plain counts, kept by watching the engine, written out by `exposition`.

Everything is counted once, here, and given out under two names (qinfer's and vLLM's), so the two can never
disagree. A request counts as one for its time to first token, latency and sizes; each of its n choices counts
as one for inter-token gaps, time per output token and the reason it finished. Recorded on the engine's
thread, read on the server's, under one lock that is held for microseconds.

With R requests one after another, P prompt and M answer tokens each, no end of sequence: time to first token
R observations, inter-token R(M-1), latencies R, step tokens R·M observations that sum to R(P+M).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from qinfer.engine.options import EngineStats
from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.sampling_params import SamplingParams

REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of observations up to each bound, their number and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last is beyond every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self, bounds: Sequence[float] | None = None) -> list[tuple[str, float]]:
        """Prometheus' buckets: (bound, observations up to it), at `bounds`, which must be among its own."""
        chosen = frozenset(self.bounds if bounds is None else bounds)
        assert chosen <= frozenset(self.bounds)
        buckets, total = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            total += count
            if bound in chosen:
                buckets.append((repr(float(bound)), float(total)))
        return [*buckets, ("+Inf", float(sum(self.counts)))]


# vLLM's bounds, which its dashboards expect, and finer ones: a small quantized model answers in a millisecond
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
_FINE = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075)


def _with_fine(bounds: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted({*bounds, *_FINE}))


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the context, in tokens."""
    bounds = [m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5)]
    return tuple(float(bound) for bound in bounds if bound <= max_model_len)


@dataclass
class _Choice:
    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    finished: bool = False


@dataclass
class _Live:
    """A request that the engine works on; times are monotonic seconds."""

    params: SamplingParams
    arrival: float
    choices: dict[int, _Choice] = field(default_factory=dict)


class ServerMetrics:
    """Counts of one server; an `Observer` of its AsyncLLM."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.lock = threading.Lock()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.http_live = 0  # requests being answered, those of operators not counted
        self.first_token = Histogram(_with_fine(FIRST_TOKEN))
        self.inter_token = Histogram(_with_fine(PER_TOKEN))
        self.per_token = Histogram(_with_fine(PER_TOKEN))
        self.latency = Histogram(LATENCY)
        self.queue = Histogram(LATENCY)
        self.prefill = Histogram(LATENCY)
        self.decode = Histogram(LATENCY)
        self.inference = Histogram(LATENCY)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_max_tokens = Histogram(tokens)
        self.request_n = Histogram(CHOICES)
        self._live: dict[str, _Live] = {}

    def added(self, request_id: str, params: SamplingParams, arrival: float) -> None:
        """Starts the clock of a request."""
        self._live[request_id] = _Live(params, arrival)

    def stepped(self, outputs: Sequence[RequestOutput], stats: EngineStats, now: float) -> None:
        """Counts what a step has made."""
        with self.lock:
            made = sum(self._take(output, now) for output in outputs if output.request_id in self._live)
            if made:
                self.step_tokens.observe(made)

    def ended(self, request_id: str, reason: str) -> None:
        """Counts the choices that will not be finished."""
        live = self._live.pop(request_id, None)
        if live is None:  # taken in before this began to watch
            return
        with self.lock:
            self.finished[reason] += live.params.n - sum(c.finished for c in live.choices.values())

    def count_http(self, handler: str, method: str, status: int) -> None:
        """Counts an HTTP answer; `handler` is the route's pattern, so that the labels stay few."""
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
        with self.lock:
            self.http[handler, known, str(status)] += 1

    def _take(self, output: RequestOutput, now: float) -> int:
        """Tokens that this output adds: the prompt's with the first one."""
        live = self._live[output.request_id]
        made = 0
        if not live.choices:
            made += self._first(output, live, now)
        for completion in output.outputs:
            made += self._choice(completion, live.choices.setdefault(completion.index, _Choice()), now)
        if output.finished:
            self._finish(output, self._live.pop(output.request_id), now)
        return made

    def _first(self, output: RequestOutput, live: _Live, now: float) -> int:
        num_prompt = len(output.prompt_token_ids)
        self.first_token.observe(now - live.arrival)
        self.prompt_tokens += num_prompt
        self.cached_tokens += output.num_cached_tokens or 0
        return num_prompt

    def _choice(self, completion: CompletionOutput, choice: _Choice, now: float) -> int:
        made = len(completion.token_ids) - choice.num_tokens
        if made > 0:
            if choice.num_tokens:
                self.inter_token.observe(now - choice.last)
            else:
                choice.first = now
            choice.num_tokens, choice.last = len(completion.token_ids), now
            self.generation_tokens += made
        if completion.finish_reason is not None and not choice.finished:
            choice.finished = True
            self.finished[completion.finish_reason] += 1
            gaps = max(1, choice.num_tokens - 1)
            self.per_token.observe((choice.last - choice.first) / gaps)
        return made

    def _finish(self, output: RequestOutput, live: _Live, now: float) -> None:
        self.latency.observe(now - live.arrival)
        self.request_prompt_tokens.observe(len(output.prompt_token_ids))
        self.request_generation_tokens.observe(sum(choice.num_tokens for choice in live.choices.values()))
        self.request_n.observe(live.params.n)
        if live.params.max_tokens is not None:
            self.request_max_tokens.observe(live.params.max_tokens)
        if (times := output.metrics) is not None:
            self.queue.observe(times.scheduled_ts - times.queued_ts)
            self.prefill.observe(times.first_token_ts - times.scheduled_ts)
            self.decode.observe(times.last_token_ts - times.first_token_ts)
            self.inference.observe(times.last_token_ts - times.scheduled_ts)
