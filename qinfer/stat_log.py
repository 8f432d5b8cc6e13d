"""One line every ten seconds about what an engine does, in vLLM's words, for whoever watches a log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qinfer.engine.options import EngineStats

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds


class StatLog:
    """Remembers what the last line counted; `stats` are those of a new engine."""

    def __init__(self, stats: EngineStats) -> None:
        self._before, self._since = stats, time.monotonic()

    def tick(self, stats: EngineStats, now: float) -> None:
        """Writes the line where it is time for it."""
        if now - self._since >= INTERVAL:
            self.write(stats, now)

    def write(self, stats: EngineStats, now: float) -> None:
        """Writes the line: at INFO, at DEBUG where nothing has happened."""
        before, seconds = self._before, max(now - self._since, 1e-9)
        self._before, self._since = stats, now
        made = stats.generation_tokens - before.generation_tokens
        read = stats.prompt_tokens - before.prompt_tokens
        asked, found = stats.prefix_queries - before.prefix_queries, stats.prefix_hits - before.prefix_hits
        busy = made or read or stats.num_running or stats.num_waiting
        logger.log(
            logging.INFO if busy else logging.DEBUG,
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d "
            "reqs, Waiting: %d reqs, Preemptions: %d, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            read / seconds,
            made / seconds,
            stats.num_running,
            stats.num_waiting,
            stats.num_preemptions - before.num_preemptions,
            100 * stats.kv_usage,
            100 * found / max(asked, 1),
        )
