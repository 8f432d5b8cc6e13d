"""/metrics: the numbers of `metrics` and of the engine as Prometheus families, made anew at each scrape.

One collector in a registry of the app's own: two servers in one process, and a test that makes many, do not
meet. Every number goes out as `qinfer_*` (`promtool check metrics` finds nothing to say) and, unless the
operator says `none`, under vLLM's name and bounds with its labels `model_name` and `engine`, so that its
dashboards and the routers that balance by them work unchanged. (promtool dislikes the colons.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.server.metrics import FIRST_TOKEN, PER_TOKEN, REASONS, Histogram, ServerMetrics
from qinfer.server.options import Compat
from qinfer.server.state import ServerState

GATE_STATES = ("dense", "passed", "ungated")


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
# name after "qinfer_": kind, name after "vllm:", meaning
_NUMBERS: Mapping[str, tuple[_Family, str | None, str]] = {
    "requests_running": (GaugeMetricFamily, "num_requests_running", "Sequences being computed."),
    "requests_waiting": (GaugeMetricFamily, "num_requests_waiting", "Requests waiting for a place."),
    "kv_cache_usage_ratio": (GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."),
    "kv_cache_capacity_tokens": (GaugeMetricFamily, None, "Tokens that the KV pages hold."),
    "kv_cache_capacity_sequences": (GaugeMetricFamily, None, "Longest sequences that the KV pages hold."),
    "kv_cache_capacity_unquantized_tokens": (
        GaugeMetricFamily,
        None,
        "Tokens that the unquantized model's KV pages would hold in this memory.",
    ),
    "engine_ready": (GaugeMetricFamily, None, "1 while the engine takes requests, else 0."),
    "prompt_tokens": (CounterMetricFamily, "prompt_tokens", "Prompt tokens, cached ones too."),
    "cached_prompt_tokens": (CounterMetricFamily, "prompt_tokens_cached", "Prompt tokens not recomputed."),
    "generation_tokens": (CounterMetricFamily, "generation_tokens", "Tokens generated."),
    "preemptions": (CounterMetricFamily, "num_preemptions", "Times a sequence gave its pages back."),
    "prefix_cache_queried_tokens": (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up."),
    "prefix_cache_hit_tokens": (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found cached."),
}


class _Names(NamedTuple):
    attribute: str  # of ServerMetrics
    vllm_name: str
    help: str
    vllm_bounds: tuple[float, ...] | None = None  # None: all of ours


# name after "qinfer_"
_HISTOGRAMS: Mapping[str, _Names] = {
    "time_to_first_token_seconds": _Names(
        "first_token", "time_to_first_token_seconds", "Arrival to the first token.", FIRST_TOKEN
    ),
    "inter_token_latency_seconds": _Names(
        "inter_token", "inter_token_latency_seconds", "Gaps between the tokens of a choice.", PER_TOKEN
    ),
    "time_per_output_token_seconds": _Names(
        "per_token", "request_time_per_output_token_seconds", "A choice's mean gap.", PER_TOKEN
    ),
    "request_latency_seconds": _Names("latency", "e2e_request_latency_seconds", "Arrival to the end."),
    "request_queue_seconds": _Names("queue", "request_queue_time_seconds", "Queued to first scheduled."),
    "request_prefill_seconds": _Names("prefill", "request_prefill_time_seconds", "Scheduled to first token."),
    "request_decode_seconds": _Names("decode", "request_decode_time_seconds", "First token to last."),
    "request_inference_seconds": _Names(
        "inference", "request_inference_time_seconds", "Scheduled to last token."
    ),
    "step_tokens": _Names("step_tokens", "iteration_tokens_total", "Prompt and new tokens of a step."),
    "request_prompt_tokens": _Names("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens."),
    "request_generation_tokens": _Names(
        "request_generation_tokens", "request_generation_tokens", "Generated tokens."
    ),
    "request_max_generation_tokens": _Names(
        "request_max_tokens", "request_params_max_tokens", "max_tokens that were asked for."
    ),
    "request_n": _Names("request_n", "request_params_n", "Choices that were asked for."),
}


class _Number(NamedTuple):
    name: str
    vllm_name: str | None
    kind: _Family
    help: str
    value: float


class EngineCollector(Collector):
    """Writes the families of one server."""

    def __init__(self, state: ServerState, metrics: ServerMetrics, compat: Compat) -> None:
        self.state, self.metrics, self.compat = state, metrics, compat
        self._labels = {"model_name": state.model_names[0]}

    def collect(self) -> Iterator[Metric]:
        """All families, from one consistent view of the counts."""
        with self.metrics.lock:
            families = list(self._families())
        yield from families

    def _families(self) -> Iterator[Metric]:
        for number in self._numbers():
            yield from self._both(number)
        for name, names in _HISTOGRAMS.items():
            yield from self._histograms(name, names)
        yield from self._finished()
        yield self._http()
        yield self._gate()
        yield self._memory()

    def _numbers(self) -> Iterator[_Number]:
        engine, counts = self.state.engine, self.metrics
        stats, ledger = engine.stats, engine.llm.engine.ledger
        values: dict[str, float] = {
            "requests_running": stats.num_running,
            "requests_waiting": engine.num_waiting,
            "kv_cache_usage_ratio": stats.kv_usage,
            "kv_cache_capacity_tokens": stats.kv_tokens,
            "kv_cache_capacity_sequences": ledger.sequences,
            "kv_cache_capacity_unquantized_tokens": ledger.unquantized.tokens if ledger.unquantized else 0,
            "engine_ready": float(engine.is_running),
            "prompt_tokens": counts.prompt_tokens,
            "cached_prompt_tokens": counts.cached_tokens,
            "generation_tokens": counts.generation_tokens,
            "preemptions": stats.num_preemptions,
            "prefix_cache_queried_tokens": stats.prefix_queries,
            "prefix_cache_hit_tokens": stats.prefix_hits,
        }
        for name, (kind, vllm_name, text) in _NUMBERS.items():
            yield _Number(name, vllm_name, kind, text, values[name])

    def _both(self, number: _Number) -> Iterator[Metric]:
        family = number.kind(f"qinfer_{number.name}", number.help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), number.value)
        yield family
        if self.compat == "vllm" and number.vllm_name is not None:
            labels = self._vllm_labels()
            family = number.kind(f"vllm:{number.vllm_name}", number.help, labels=list(labels))
            family.add_metric(list(labels.values()), number.value)
            yield family

    def _histograms(self, name: str, names: _Names) -> Iterator[Metric]:
        histogram: Histogram = getattr(self.metrics, names.attribute)
        family = HistogramMetricFamily(f"qinfer_{name}", names.help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
        yield family
        if self.compat == "vllm":
            labels = self._vllm_labels()
            family = HistogramMetricFamily(f"vllm:{names.vllm_name}", names.help, labels=list(labels))
            buckets = histogram.cumulative(names.vllm_bounds)
            family.add_metric(list(labels.values()), buckets, histogram.sum)
            yield family

    def _finished(self) -> Iterator[Metric]:
        counts = {reason: self.metrics.finished[reason] for reason in REASONS}
        help_text = "Choices that finished, by reason."
        yield _labelled("qinfer_requests_finished", help_text, self._labels, "reason", counts)
        if self.compat == "vllm":
            yield _labelled("vllm:request_success", help_text, self._vllm_labels(), "finished_reason", counts)

    def _http(self) -> Metric:
        names = ["handler", "method", "status"]
        family = CounterMetricFamily("qinfer_http_requests", "HTTP answers.", labels=names)
        for labels, count in self.metrics.http.items():
            family.add_metric(list(labels), count)
        return family

    def _gate(self) -> Metric:
        family = GaugeMetricFamily(
            "qinfer_gate_state", "1 for what the gate says of the weights.", labels=["state"]
        )
        for state in GATE_STATES:
            family.add_metric([state], float(state == self.state.gate.state))
        return family

    def _memory(self) -> Metric:
        ledger = self.state.engine.llm.engine.ledger
        parts = ("budget", "weights", "activations", "graphs", "reserve", "kv_pool")
        family = GaugeMetricFamily(
            "qinfer_memory_bytes", "Where the memory goes, by the ledger.", labels=[*self._labels, "part"]
        )
        for part in parts:
            family.add_metric([*self._labels.values(), part], getattr(ledger, part))
        return family

    def _vllm_labels(self) -> dict[str, str]:
        return {**self._labels, "engine": "0"}


def _labelled(name: str, text: str, labels: Mapping[str, str], key: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, key])
    for value, count in counts.items():
        family.add_metric([*labels.values(), value], count)
    return family


def make_registry(state: ServerState, metrics: ServerMetrics, compat: Compat) -> CollectorRegistry:
    """A registry with this server's families and those of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(state, metrics, compat))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry
