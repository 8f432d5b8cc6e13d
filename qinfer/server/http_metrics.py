"""HTTP answers counted: by route, method and status, with their durations and sizes.

qinfer's own name gives the status; under `vllm` there are the five families besides that its server has from
prometheus-fastapi-instrumentator, where a status is a class ("2xx") and the operators' routes do not count.
The handler is the route's pattern, so that the labels stay few. Everything here runs on the server's loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from qinfer.server.histogram import Histogram

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version")  # by vLLM
FEW = (0.1, 0.5, 1)
MANY = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)


class HttpMetrics:
    """Counts of one server's answers."""

    def __init__(self) -> None:
        self.live = 0  # requests being answered, those of operators not counted
        self.answers: Counter[tuple[str, str, str]] = Counter()  # handler, method, status
        self.classes: Counter[tuple[str, str, str]] = Counter()
        self.seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(FEW))
        self.all_seconds = Histogram(MANY)
        self.received: Counter[str] = Counter()  # bytes by handler
        self.sent: Counter[str] = Counter()

    def count(
        self, handler: str, method: str, status: int, seconds: float, *, received: int, sent: int
    ) -> None:
        """Counts an answer of `sent` bytes to a body of `received`."""
        method = method if method in METHODS else "other"
        self.answers[handler, method, str(status)] += 1
        if handler in UNCOUNTED:
            return
        self.classes[handler, method, f"{status // 100}xx"] += 1
        self.seconds[handler, method].observe(seconds)
        self.all_seconds.observe(seconds)
        self.received[handler] += received
        self.sent[handler] += sent


class HttpCollector(Collector):
    """Writes the families of one server's answers."""

    def __init__(self, metrics: HttpMetrics, *, like_vllm: bool) -> None:
        self.metrics, self.like_vllm = metrics, like_vllm

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield _answers("qinfer_http_requests", self.metrics.answers)
        if self.like_vllm:
            yield _answers("http_requests", self.metrics.classes)
            yield self._durations()
            whole = HistogramMetricFamily("http_request_duration_highr_seconds", "Of all routes.", labels=[])
            whole.add_metric([], self.metrics.all_seconds.cumulative(), self.metrics.all_seconds.sum)
            yield whole
            yield self._sizes("http_request_size_bytes", self.metrics.received)
            yield self._sizes("http_response_size_bytes", self.metrics.sent)

    def _durations(self) -> Metric:
        family = HistogramMetricFamily(
            "http_request_duration_seconds", "By route and method.", labels=["handler", "method"]
        )
        for labels, seen in self.metrics.seconds.items():
            family.add_metric(list(labels), seen.cumulative(), seen.sum)
        return family

    def _sizes(self, name: str, totals: Mapping[str, int]) -> Metric:
        family = SummaryMetricFamily(name, "Bytes of bodies.", labels=["handler"])
        for handler, total in totals.items():
            count = sum(n for (route, _, _), n in self.metrics.classes.items() if route == handler)
            family.add_metric([handler], count, total)
        return family


def _answers(name: str, counts: Mapping[tuple[str, str, str], int]) -> Metric:
    family = CounterMetricFamily(name, "HTTP answers.", labels=["handler", "method", "status"])
    for labels, count in counts.items():
        family.add_metric(list(labels), count)
    return family
