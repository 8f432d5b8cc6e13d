"""From samples to numbers, by vLLM's names and definitions, and what those leave out.

    ttft   sending to the first output
    tpot   (latency - ttft) / (tokens - 1), per request; answers of one token have none
    itl    every gap between two arrivals, of all requests
    e2el   sending to the last output

Of complete requests only. Attainment counts over requests sent: one that failed has missed. The steady state
is the longest stretch in which at least 0.8 of the most requests at once were running, both on average over
a twentieth of the load: what it does between its ramp and its tail. Tokens count there by when they came.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from qinfer.bench.sample import Sample

METRICS = ("ttft", "tpot", "itl", "e2el")
STEADY_SHARE = 0.8
_SLICES, _SMOOTH = 100, 5  # of which a slice is averaged with those around it
_DIGITS = re.compile(r"\d+")


def numbers(
    samples: Sequence[Sample], duration: float, percentiles: Sequence[float], slo: Mapping[str, float]
) -> dict[str, Any]:
    """The flat document of a load of `duration` seconds; `slo` has milliseconds by metric."""
    done = [sample for sample in samples if sample.ok]
    input_tokens = sum(sample.prompt_len for sample in done)
    output_tokens = sum(sample.output_len for sample in done)
    tokens_peak, concurrency_peak = _peaks(done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": tokens_peak,
        "max_concurrent_requests": concurrency_peak,
        **_latencies(done, percentiles),
        **_attained(samples, duration, slo),
        "steady_state": steady_state(done),
        "errors_by_type": dict(Counter(_kind(sample.error) for sample in samples if not sample.ok)),
    }


def _latencies(done: Sequence[Sample], percentiles: Sequence[float]) -> dict[str, float]:
    values = {
        "ttft": [sample.first_token for sample in done],
        "tpot": [sample.per_token for sample in done if sample.output_len > 1],
        "itl": [gap for sample in done for gap in sample.gaps],
        "e2el": [sample.latency for sample in done],
        "client_queue_time": [sample.queued for sample in done],
        "e2el_including_client_queue": [sample.queued + sample.latency for sample in done],
    }
    found: dict[str, float] = {}
    for name, seconds in values.items():
        ms = 1e3 * np.asarray(seconds or [0.0])
        found |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        found[f"std_{name}_ms"] = float(ms.std())
        found |= {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}
    return found


def _attained(samples: Sequence[Sample], duration: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """Goodput and the shares of requests sent that met each objective, and all of them."""
    if not slo:
        return {"request_goodput": None, "slo": None, "slo_attainment": None}
    met = {
        name: [sample.ok and _seconds(sample, name) * 1e3 <= slo[name] for sample in samples] for name in slo
    }
    together = [all(each) for each in zip(*met.values(), strict=True)]
    return {
        "request_goodput": sum(together) / duration,
        "slo": {f"{name}_ms": limit for name, limit in slo.items()},
        "slo_attainment": sum(together) / len(samples),
        "slo_attainment_by_metric": {name: sum(each) / len(samples) for name, each in met.items()},
    }


def _seconds(sample: Sample, metric: str) -> float:
    return {"ttft": sample.first_token, "tpot": sample.per_token, "e2el": sample.latency}[metric]


def _peaks(done: Sequence[Sample]) -> tuple[float, int]:
    """Most tokens, and most requests at work, in one of the seconds since the first was sent."""
    if not done:
        return 0.0, 0
    start = min(sample.sent for sample in done)
    tokens: defaultdict[int, float] = defaultdict(float)
    working: Counter[int] = Counter()
    for sample in done:
        for when in sample.arrivals:
            tokens[int(when - start)] += sample.output_len / len(sample.arrivals)
        working.update(range(int(sample.sent - start), int(sample.arrivals[-1] - start) + 1))
    return max(tokens.values()), max(working.values())


def steady_state(done: Sequence[Sample], share: float = STEADY_SHARE) -> dict[str, float] | None:
    """The longest stretch with at least `share` of the most requests at once; None where nothing ran."""
    if not done:
        return None
    edges = np.linspace(min(s.sent for s in done), max(s.arrivals[-1] for s in done), _SLICES + 1)
    busy = np.array([_busy(done, *slice_) for slice_ in pairwise(edges)])
    around = np.ones(_SMOOTH)  # requests that end together leave a moment without any
    busy = np.convolve(busy, around, "same") / np.convolve(np.ones(_SLICES), around, "same")
    enough = busy >= share * busy.max() - 1e-9
    first, length, run = 0, 0, 0
    for i, steady in enumerate(enough):
        run = run + 1 if steady else 0
        if run > length:
            first, length = i + 1 - run, run
    start, end = float(edges[first]), float(edges[first + length])
    tokens = sum(_tokens_between(sample, start, end) for sample in done)
    return {
        "start": start,
        "end": end,
        "output_throughput": tokens / (end - start),
        "avg_concurrency": _busy(done, start, end) / (end - start),
    }


def _busy(done: Sequence[Sample], start: float, end: float) -> float:
    """Seconds between the two that requests spent running, summed over requests."""
    return sum(max(0.0, min(end, s.arrivals[-1]) - max(start, s.sent)) for s in done)


def _tokens_between(sample: Sample, start: float, end: float) -> float:
    """Tokens by the arrivals that lie in between, each of which brought as many as the others."""
    inside = sum(start <= when <= end for when in sample.arrivals)
    return inside * sample.output_len / len(sample.arrivals)


def _kind(error: str) -> str:
    """An error without its particulars, to count by."""
    return _DIGITS.sub("N", error.split("\n")[0])[:100] if not error.startswith("HTTP") else error[:8]
