"""GET /qinfer/stats: what a person who watches a server wants to see, once a second, as one JSON document.

The same numbers as /metrics, with what Prometheus has no place for: percentiles of the last requests, the KV
pages as a map, the memory ledger, the gate's words. Counters are totals since the start; whoever shows a rate
takes the difference of two documents, so that the server keeps nothing for those who watch. No prompt and no
answer is in it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from qinfer import __version__
from qinfer.engine.pages import PageMap
from qinfer.errors import EngineDeadError
from qinfer.server.metrics import Recent, ServerMetrics
from qinfer.server.state import ServerState

if TYPE_CHECKING:
    from qinfer.engine.engine import Engine

MAX_CELLS = 1024  # of the map of pages
NUM_SHOWN = 20  # requests
PAGES_SECONDS = 2.0  # that an engine has to tell of its pages, between two steps; all else is known here
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class ModelStats(BaseModel):
    """What is served, and what the gate says of it."""

    names: list[str]
    max_model_len: int
    facts: dict[str, str]
    gate: dict[str, Any]


class RequestStats(BaseModel):
    """Sequences running, requests waiting, and what has become of the others since the start."""

    running: int
    waiting: int
    finished: dict[str, int]
    rejected: dict[str, int]
    preemptions: int


class TokenStats(BaseModel):
    """Tokens since the start."""

    prompt: int
    cached: int
    generation: int


class KVStats(BaseModel):
    """Share of the KV pages that sequences hold; `pages` is None where the engine does not tell."""

    usage: float
    tokens: int
    pages: dict[str, Any] | None


class RecentStats(BaseModel):
    """A request that has ended; seconds."""

    request_id: str
    ended: float
    prompt_tokens: int
    generation_tokens: int
    first_token: float | None
    per_token: float | None
    latency: float
    reason: str


class Stats(BaseModel):
    """The whole document; `latency` has percentiles in seconds over the last `latency_requests`."""

    time: float
    version: str
    state: Literal["ready", "stopping", "silent", "dead"]
    model: ModelStats
    requests: RequestStats
    tokens: TokenStats
    kv: KVStats
    latency: dict[str, dict[str, float]]
    latency_requests: int
    recent: list[RecentStats]
    ledger: dict[str, Any]


def live_routes(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The route."""
    router = APIRouter(prefix="/qinfer")

    @router.get("/stats")
    async def stats() -> Stats:
        return stats_of(state, metrics, await _pages(state))

    return router


def stats_of(state: ServerState, metrics: ServerMetrics, pages: PageMap | None) -> Stats:
    """The document of this moment."""
    engine = state.engine
    numbers = engine.stats
    with metrics.lock:
        finished, rejected, recent = dict(metrics.finished), dict(metrics.rejected), list(metrics.recent)
        tokens = TokenStats(
            prompt=metrics.prompt_tokens, cached=metrics.cached_tokens, generation=metrics.generation_tokens
        )
    return Stats(
        time=time.time(),
        version=__version__,
        state=_state_of(state),
        model=ModelStats(
            names=list(state.model_names),
            max_model_len=engine.max_model_len,
            facts=engine.card.facts,
            gate=state.gate._asdict(),
        ),
        requests=RequestStats(
            running=numbers.num_running,
            waiting=engine.num_waiting,
            finished=finished,
            rejected=rejected,
            preemptions=numbers.num_preemptions,
        ),
        tokens=tokens,
        kv=KVStats(
            usage=numbers.kv_usage, tokens=numbers.kv_tokens, pages=pages._asdict() if pages else None
        ),
        latency=latencies(recent),
        latency_requests=len(recent),
        recent=[RecentStats(**one._asdict()) for one in reversed(recent[-NUM_SHOWN:])],
        ledger=engine.card.ledger.to_dict(),
    )


def _state_of(state: ServerState) -> Literal["ready", "stopping", "silent", "dead"]:
    if state.is_ready:
        return "ready"
    if state.engine.errored:
        return "dead"
    return "stopping" if state.engine.is_awake else "silent"


def latencies(recent: Iterable[Recent]) -> dict[str, dict[str, float]]:
    """Percentiles of what was measured of these requests, by what it is; empty where nothing was."""
    requests = list(recent)
    columns: dict[str, list[float | None]] = {
        "first_token": [one.first_token for one in requests],
        "per_token": [one.per_token for one in requests],
        "request": [one.latency for one in requests if one.reason != "abort"],
    }
    return {
        name: percentiles(value for value in found if value is not None) for name, found in columns.items()
    }


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The smallest value that so many are not above, for each of QUANTILES; empty for none."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in QUANTILES.items()}


async def _pages(state: ServerState) -> PageMap | None:
    """The map, where the engine tells it in time: its process may have stopped, or be in a long step."""
    if not state.engine.is_awake:
        return None
    try:
        return await asyncio.wait_for(state.engine.ask(_survey), PAGES_SECONDS)
    except (EngineDeadError, TimeoutError):
        return None


def _survey(engine: Engine) -> PageMap:
    return engine.pages.survey(MAX_CELLS)
