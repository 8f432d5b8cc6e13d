"""/metrics of a batch, on a port of its own: a run of hours is watched like a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server

from qinfer.server.exposition import make_registry
from qinfer.server.http_metrics import HttpMetrics
from qinfer.server.metrics import ServerMetrics
from qinfer.server.state import ServerState


@contextmanager
def metrics_served(state: ServerState, address: tuple[str, int] | None) -> Iterator[None]:
    """Serves them at (host, port) until the context ends; None: not at all. Port 0 takes a free one."""
    if address is None:
        yield
        return
    metrics = ServerMetrics(state.engine.max_model_len, state.options.histogram_bounds)
    state.engine.observe(metrics)
    host, port = address
    server, thread = start_http_server(port, host, make_registry(state, metrics, HttpMetrics()))
    print(f"metrics at http://{host}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
