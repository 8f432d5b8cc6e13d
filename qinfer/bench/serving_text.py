"""The document of `qinfer bench serve` for a person, laid out as vLLM's tool does; details of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.bench.sample import Sample

_NAMES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Wait on the Client", "wait"),
}
_WIDTH = 50


def to_text(document: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Counts, rates, then the chosen latencies."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", document["completed"]),
        ("Failed requests:", document["failed"]),
        ("Benchmark duration (s):", document["duration"]),
        ("Total input tokens:", document["total_input_tokens"]),
        ("Total generated tokens:", document["total_output_tokens"]),
        ("Request throughput (req/s):", document["request_throughput"]),
        ("Output token throughput (tok/s):", document["output_throughput"]),
        ("Total token throughput (tok/s):", document["total_token_throughput"]),
        ("Peak output token throughput (tok/s):", document["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", document["max_concurrent_requests"]),
    ]
    if (steady := document["steady_state"]) is not None:
        rows += [
            ("Steady-state output throughput (tok/s):", steady["output_throughput"]),
            ("Steady-state concurrency:", steady["avg_concurrency"]),
        ]
    if (hits := document["prefix_cache_hit_rate"]) is not None:
        rows.append(("Prefix cache hit rate (%):", 100 * hits))
    if document["slo"]:
        rows += [
            ("Request goodput (req/s):", document["request_goodput"]),
            ("Objectives met (% of sent):", 100 * document["slo_attainment"]),
        ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), *(_row(*row) for row in rows)]
    waited = ["client_queue_time"] if document["max_concurrency"] else []
    for metric in (*metrics, *waited):
        name, short = _NAMES[metric]
        lines.append(f" {name} ".center(_WIDTH, "-"))
        lines.append(_row(f"Mean {short} (ms):", document[f"mean_{metric}_ms"]))
        lines.append(_row(f"Median {short} (ms):", document[f"median_{metric}_ms"]))
        lines += [_row(f"P{p:g} {short} (ms):", document[f"p{p:g}_{metric}_ms"]) for p in percentiles]
    if "probe_completed" in document:
        lines += _of_probes(document)
    errors = [f"failed {count} times: {kind}" for kind, count in document["errors_by_type"].items()]
    return "\n".join([*lines, "=" * _WIDTH, *errors])


def _of_probes(document: Mapping[str, Any]) -> list[str]:
    words, names = ("completed", "failed"), ("Median", "P99", "Max")
    return [
        " Probes ".center(_WIDTH, "-"),
        *(_row(f"{word.capitalize()} probes:", document[f"probe_{word}"]) for word in words),
        *(_row(f"{name} probe E2EL (ms):", document[f"probe_{name.lower()}_e2el_ms"]) for name in names),
    ]


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value:<9.2f}" if isinstance(value, float) else f"{name:<40} {value:<9}"


def details(samples: Sequence[Sample]) -> dict[str, Any]:
    """What vLLM's --save-detailed adds: one entry per request, in order."""
    return {
        "input_lens": [sample.prompt_len for sample in samples],
        "output_lens": [sample.output_len if sample.ok else 0 for sample in samples],
        "ttfts": [sample.first_token if sample.ok else 0.0 for sample in samples],
        "itls": [sample.gaps if sample.ok else [] for sample in samples],
        "latencies": [sample.latency if sample.ok else 0.0 for sample in samples],
        "queue_times": [sample.queued for sample in samples],
        "start_times": [sample.sent for sample in samples],
        "generated_texts": [sample.text for sample in samples],
        "errors": [sample.error for sample in samples],
    }
