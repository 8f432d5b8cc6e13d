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
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qinfer.engine.options import EngineStats
from qinfer.live_request import Ask
from qinfer.output_parts import About, Part
from qinfer.server.histogram import CHOICES, PREEMPTIONS, Histogram, settle_bounds

REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("queue_full", "queued_tokens", "draining")  # why a request was not let in
PHASES = ("prefill", "decode", "mixed")
NUM_RECENT = 256


class Recent(NamedTuple):
    """A request that has ended; times in seconds, None where there was no such token."""

    request_id: str
    ended: float  # wall-clock
    prompt_tokens: int
    generation_tokens: int
    first_token: float | None
    per_token: float | None
    latency: float
    reason: str  # of its first choice


@dataclass
class _Choice:
    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    finish_reason: str | None = None


@dataclass
class _Live:
    """A request that the engine works on; times are monotonic seconds."""

    ask: Ask
    num_prompt: int = 0  # counts from the first part on
    num_cached: int = 0
    first: float | None = None
    choices: dict[int, _Choice] = field(default_factory=dict)


class ServerMetrics:
    """Counts of one server; an `Observer` of its AsyncLLM."""

    def __init__(self, max_model_len: int, chosen: Mapping[str, tuple[float, ...]] | None = None) -> None:
        """`chosen` are histogram bounds by family, as `histogram.parse_bounds` gives them."""
        self.bounds = settle_bounds(max_model_len, chosen or {})
        bounds = self.bounds.ours
        self.lock = threading.Lock()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.rejected: Counter[str] = Counter(dict.fromkeys(REJECTIONS, 0))
        self.recent: deque[Recent] = deque(maxlen=NUM_RECENT)
        self.first_token = Histogram(bounds.time_to_first_token)
        self.inter_token = Histogram(bounds.inter_token_latency)
        self.per_token = Histogram(bounds.inter_token_latency)
        self.latency = Histogram(bounds.request_latency)
        self.queue = Histogram(bounds.request_latency)
        self.prefill = Histogram(bounds.request_latency)
        self.decode = Histogram(bounds.request_latency)
        self.inference = Histogram(bounds.request_latency)
        self.step_seconds = {phase: Histogram(bounds.step_duration) for phase in PHASES}
        self.step_tokens = Histogram(bounds.step_tokens)
        self.step_sequences = Histogram(bounds.step_tokens)
        self.request_prompt_tokens = Histogram(bounds.request_tokens)
        self.request_computed_tokens = Histogram(bounds.request_tokens)
        self.request_generation_tokens = Histogram(bounds.request_tokens)
        self.request_longest = Histogram(bounds.request_tokens)
        self.request_max_tokens = Histogram(bounds.request_tokens)
        self.request_n = Histogram(CHOICES)
        self.request_preemptions = Histogram(PREEMPTIONS)
        self._live: dict[int, _Live] = {}

    def added(self, ask: Ask) -> None:
        """Starts the clock of a request."""
        self._live[ask.number] = _Live(ask)

    def stepped(
        self, parts: Sequence[tuple[int, Part]], stats: EngineStats, now: float, seconds: float
    ) -> None:
        """Counts what a step has made."""
        step = stats.last_step
        with self.lock:
            for number, part in parts:
                if (live := self._live.get(number)) is not None:
                    self._take(live, part, now)
            if num_sequences := step.num_prefills + step.num_decodes:
                self.step_seconds[step.phase].observe(seconds)
                self.step_tokens.observe(step.prefill_tokens + step.new_tokens)
                self.step_sequences.observe(num_sequences)

    def ended(self, number: int, reason: str) -> None:
        """Counts the choices that will not be finished."""
        live = self._live.pop(number, None)
        if live is None:  # taken in before this began to watch
            return
        with self.lock:
            self.finished[reason] += live.ask.params.n - sum(
                choice.finish_reason is not None for choice in live.choices.values()
            )
            self.recent.append(_recent(live, time.monotonic(), reason))

    def reject(self, reason: str) -> None:
        """Counts a request that was not let in; `reason` is one of REJECTIONS."""
        assert reason in self.rejected
        with self.lock:
            self.rejected[reason] += 1

    def _take(self, live: _Live, part: Part, now: float) -> None:
        changed, about = part
        if not live.num_prompt:
            live.num_prompt = len(live.ask.token_ids)
            live.num_cached = 0 if about is None else about.num_cached_tokens or 0
            self.prompt_tokens += live.num_prompt
            self.cached_tokens += live.num_cached
        if live.first is None and any(token_ids for _, _, token_ids, *_ in changed):
            live.first = now
            self.first_token.observe(now - live.ask.arrival)
        for index, _, token_ids, _, _, finish_reason, _ in changed:
            choice = live.choices.setdefault(index, _Choice())
            self._choice(choice, len(token_ids), finish_reason, now)
        if about is not None and about.finished:
            self._finish(self._live.pop(live.ask.number), about, now)

    def _choice(self, choice: _Choice, made: int, finish_reason: str | None, now: float) -> None:
        if made > 0:
            if choice.num_tokens:
                self.inter_token.observe(now - choice.last)
            else:
                choice.first = now
            choice.num_tokens += made
            choice.last = now
            self.generation_tokens += made
        if finish_reason is not None:
            choice.finish_reason = finish_reason
            self.finished[finish_reason] += 1
            gaps = max(1, choice.num_tokens - 1)
            self.per_token.observe((choice.last - choice.first) / gaps)

    def _finish(self, live: _Live, about: About, now: float) -> None:
        lengths = [choice.num_tokens for choice in live.choices.values()]
        self.latency.observe(now - live.ask.arrival)
        self.request_prompt_tokens.observe(live.num_prompt)
        self.request_computed_tokens.observe(live.num_prompt - live.num_cached)
        self.request_generation_tokens.observe(sum(lengths))
        self.request_longest.observe(max(lengths))
        params = live.ask.params
        self.request_n.observe(params.n)
        if params.max_tokens is not None:
            self.request_max_tokens.observe(params.max_tokens)
        if (times := about.metrics) is not None:
            self.queue.observe(times.scheduled_ts - times.queued_ts)
            self.request_preemptions.observe(times.num_preemptions)
            if live.first is not None:  # else it has ended, by an error, without a token
                self.prefill.observe(times.first_token_ts - times.scheduled_ts)
                self.decode.observe(times.last_token_ts - times.first_token_ts)
                self.inference.observe(times.last_token_ts - times.scheduled_ts)
        reason = live.choices[0].finish_reason
        assert reason is not None
        self.recent.append(_recent(live, now, reason))


def _recent(live: _Live, now: float, reason: str) -> Recent:
    choice = live.choices.get(0, _Choice())
    gaps = choice.num_tokens - 1
    return Recent(
        live.ask.request_id,
        time.time(),
        live.num_prompt,
        sum(one.num_tokens for one in live.choices.values()),
        None if live.first is None else live.first - live.ask.arrival,
        (choice.last - choice.first) / gaps if gaps > 0 else None,
        now - live.ask.arrival,
        reason,
    )
