"""/metrics: the numbers of `metrics` and of the engine as Prometheus families, made anew at each scrape.

One collector in a registry of the app's own: two servers in one process, and a test that makes many, do not
meet. Every number goes out as `qinfer_*` (`promtool check metrics` finds nothing to say) and, unless the
operator says `none`, under vLLM's name and bounds with its labels `model_name` and `engine`, so that its
dashboards and the routers that balance by them work unchanged. (promtool dislikes the colons.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qinfer.server.families import COUNTER, GAUGE, HISTOGRAMS, NUMBERS, Family, HistogramNames
from qinfer.server.histogram import Histogram
from qinfer.server.http_metrics import HttpCollector, HttpMetrics
from qinfer.server.metrics import REASONS, ServerMetrics
from qinfer.server.state import ServerState

GATE_STATES = ("dense", "passed", "failed", "ungated")
LEDGER_PARTS = ("budget", "weights", "activations", "graphs", "reserve", "kv_pool")


class EngineCollector(Collector):
    """Writes the families of one server."""

    def __init__(self, state: ServerState, metrics: ServerMetrics) -> None:
        self.state, self.metrics = state, metrics
        self.like_vllm = state.options.metrics_compat == "vllm"
        self._labels = {"model_name": state.model_names[0]}
        self._vllm_labels = {**self._labels, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """All families, from one consistent view of the counts."""
        with self.metrics.lock:
            families = [*self._families(), *(self._vllm_families() if self.like_vllm else ())]
        yield from families

    def _families(self) -> Iterator[Metric]:
        """Those that have one name in each world, and qinfer's own."""
        values = self._values()
        for name, (kind, vllm_name, text) in NUMBERS.items():
            yield from self._both(kind, name, vllm_name, text, values[name])
        for name, names in HISTOGRAMS.items():
            yield from self._histograms(name, names)
        yield self._steps()
        yield self._step_seconds()
        yield self._count("qinfer_requests_finished", "Choices that ended.", "reason", self._finished())
        yield self._count("qinfer_requests_rejected", "Requests not let in.", "reason", self.metrics.rejected)
        yield self._fallbacks()
        yield self._gate()
        yield self._memory()
        yield self._info("qinfer_model_info", "What is served.", self.state.engine.card.facts)

    def _vllm_families(self) -> Iterator[Metric]:
        counts, labels = self.metrics, self._vllm_labels
        computed = counts.prompt_tokens - counts.cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": counts.cached_tokens}
        waiting = {"capacity": self.state.engine.num_waiting, "deferred": 0}
        for kind, name, key, values in (
            (COUNTER, "request_success", "finished_reason", self._finished() | {"repetition": 0}),
            (COUNTER, "prompt_tokens_by_source", "source", sources | {"external_kv_transfer": 0}),
            (COUNTER, "admission_rejections", "reason", counts.rejected),
            (GAUGE, "num_requests_waiting_by_reason", "reason", waiting),
        ):
            text = f"As qinfer counts it, by {key}."
            yield _family(kind, f"vllm:{name}", text, labels, [({key: k}, v) for k, v in values.items()])
        facts = self.state.engine.card.cache_facts
        yield _family(GAUGE, "vllm:cache_config_info", "The KV cache.", labels, [(facts, 1)])

    def _values(self) -> dict[str, float]:
        """NUMBERS' values by name."""
        engine, counts = self.state.engine, self.metrics
        stats, ledger = engine.stats, engine.card.ledger
        return {
            "requests_running": stats.num_running,
            "requests_waiting": engine.num_waiting,
            "kv_cache_usage_ratio": stats.kv_usage,
            "kv_cache_capacity_tokens": stats.kv_tokens,
            "kv_cache_capacity_sequences": ledger.sequences,
            "kv_cache_capacity_unquantized_tokens": ledger.unquantized.tokens if ledger.unquantized else 0,
            "kv_cache_bytes": ledger.kv_pool,
            "model_weight_bytes": ledger.weights,
            "engine_ready": float(self.state.is_ready),
            "prompt_tokens": counts.prompt_tokens,
            "cached_prompt_tokens": counts.cached_tokens,
            "generation_tokens": counts.generation_tokens,
            "preemptions": stats.num_preemptions,
            "prefix_cache_queried_tokens": stats.prefix_queries,
            "prefix_cache_hit_tokens": stats.prefix_hits,
        }

    def _both(
        self, kind: Family, name: str, vllm_name: str | None, text: str, value: float
    ) -> Iterator[Metric]:
        yield _family(kind, f"qinfer_{name}", text, self._labels, [({}, value)])
        if self.like_vllm and vllm_name is not None:
            yield _family(kind, f"vllm:{vllm_name}", text, self._vllm_labels, [({}, value)])

    def _histograms(self, name: str, names: HistogramNames) -> Iterator[Metric]:
        histogram: Histogram = getattr(self.metrics, names.attribute)
        family = HistogramMetricFamily(f"qinfer_{name}", names.help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
        yield family
        if self.like_vllm and names.vllm_name is not None:
            labels = self._vllm_labels
            bounds = getattr(self.metrics.bounds.vllm, names.bounds) if names.bounds else None
            family = HistogramMetricFamily(f"vllm:{names.vllm_name}", names.help, labels=list(labels))
            family.add_metric(list(labels.values()), histogram.cumulative(bounds), histogram.sum)
            yield family

    def _steps(self) -> Metric:
        counts = {phase: sum(seen.counts) for phase, seen in self.metrics.step_seconds.items()}
        return self._count("qinfer_engine_steps", "Steps of the engine.", "phase", counts)

    def _step_seconds(self) -> Metric:
        labels = [*self._labels, "phase"]
        family = HistogramMetricFamily(
            "qinfer_step_duration_seconds", "Time that steps of the engine took.", labels=labels
        )
        for phase, seen in self.metrics.step_seconds.items():
            family.add_metric([*self._labels.values(), phase], seen.cumulative(), seen.sum)
        return family

    def _finished(self) -> dict[str, int]:
        return {reason: self.metrics.finished[reason] for reason in REASONS}

    def _fallbacks(self) -> Metric:
        counts = self.state.engine.stats.fallbacks
        found = [({"op": op, "reason": why}, count) for op, why, count in counts]
        text = "Times that an op had no kernel for its input and ran in plain torch."
        return _family(COUNTER, "qinfer_kernel_fallbacks", text, self._labels, found, ("op", "reason"))

    def _gate(self) -> Metric:
        found = [({"state": state}, float(state == self.state.gate.state)) for state in GATE_STATES]
        return _family(GAUGE, "qinfer_gate_state", "1 for what the gate says of the weights.", {}, found)

    def _memory(self) -> Metric:
        ledger = self.state.engine.card.ledger
        found = [({"part": part}, getattr(ledger, part)) for part in LEDGER_PARTS]
        text = "Where the memory goes, by the ledger."
        return _family(GAUGE, "qinfer_memory_bytes", text, self._labels, found)

    def _count(self, name: str, text: str, key: str, counts: Mapping[str, int]) -> Metric:
        return _family(COUNTER, name, text, self._labels, [({key: k}, v) for k, v in counts.items()])

    def _info(self, name: str, text: str, facts: Mapping[str, str]) -> Metric:
        return _family(GAUGE, name, text, self._labels, [(facts, 1)])


def _family(
    kind: Family,
    name: str,
    text: str,
    labels: Mapping[str, str],
    samples: Iterable[tuple[Mapping[str, str], float]],
    own: Iterable[str] = (),
) -> GaugeMetricFamily | CounterMetricFamily:
    """A family of `samples`, whose labels come after `labels`; `own` names theirs where there may be none."""
    found = list(samples)
    family = kind(name, text, labels=[*labels, *(found[0][0] if found else own)])
    for more, value in found:
        family.add_metric([*labels.values(), *more.values()], value)
    return family


def make_registry(state: ServerState, metrics: ServerMetrics, http: HttpMetrics) -> CollectorRegistry:
    """A registry with this server's families and those of its process, and of the engine's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(state, metrics))
    registry.register(HttpCollector(http, like_vllm=state.options.metrics_compat == "vllm"))
    ProcessCollector(registry=registry)
    ProcessCollector("qinfer_engine", pid=lambda: state.engine.pid, registry=registry)
    PlatformCollector(registry=registry)
    return registry
