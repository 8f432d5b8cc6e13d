"""Probes: short questions for one token each, at a steady rate beside a load and around its concurrency.

What they wait is what somebody with a short question waits while others ask for much. They are no part of
the load's own numbers, but the server's counters know no difference. Keys are vLLM's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from qinfer.bench.sample import Clock, Sample, Target, ask, since

QUESTION = "Hi"


@asynccontextmanager
async def probing(target: Target, rate: float, fields: Mapping[str, Any]) -> AsyncIterator[list[Sample]]:
    """Sends `rate` a second (0: none) until the context ends, which waits for those that were sent."""
    samples: list[Sample] = []
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:

        async def send(body: bytes, clock: Clock) -> None:
            while not over.is_set():
                sample = Sample(0, due=len(samples) / rate)
                samples.append(sample)
                group.create_task(ask(target, body, sample, clock))
                try:
                    await asyncio.wait_for(over.wait(), len(samples) / rate - clock())
                except TimeoutError:  # the next is due
                    continue

        if rate:
            group.create_task(send(target.body(QUESTION, 1, fields), since(time.perf_counter())))
        try:
            yield samples
        finally:
            over.set()


def probe_numbers(samples: Sequence[Sample], rate: float) -> dict[str, float]:
    """What became of them, in milliseconds; nothing without probes, 0 where none was answered."""
    if not rate:
        return {}
    done = [sample for sample in samples if sample.ok]
    ms = 1e3 * np.asarray([sample.latency for sample in done] or [0.0])
    return {
        "probe_request_rate": rate,
        "probe_completed": len(done),
        "probe_failed": len(samples) - len(done),
        "probe_median_e2el_ms": float(np.median(ms)),
        "probe_p99_e2el_ms": float(np.percentile(ms, 99)),
        "probe_max_e2el_ms": float(ms.max()),
    }
