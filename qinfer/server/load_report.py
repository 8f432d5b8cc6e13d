"""The header by which a server tells a balancer its load: ORCA's `endpoint-load-metrics`, as vLLM writes it.

A request that carries `endpoint-load-metrics-format: TEXT` (or JSON) gets, with its answer, how full the KV
cache is and how many requests wait, so that a gateway can weigh its next choice without scraping /metrics.
"""

from __future__ import annotations

import json

from qinfer.async_llm import AsyncLLM

ASKED = "endpoint-load-metrics-format"
HEADER = "endpoint-load-metrics"


def load_report(engine: AsyncLLM, form: str) -> str | None:
    """The header's value; None for a format that is neither TEXT nor JSON."""
    numbers = {
        "kv_cache_usage_perc": float(engine.stats.kv_usage),
        "num_requests_waiting": float(engine.num_waiting),
    }
    match form.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items())
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": numbers})
    return None
