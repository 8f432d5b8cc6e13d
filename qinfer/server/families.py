"""What is told of every number at /metrics: qinfer's name, vLLM's, the kind, the meaning. Tables, no code.

Counters get `_total` where they are written. A name of vLLM's that ends in `_total` as a histogram is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


class NumberNames(NamedTuple):
    """A number without labels of its own."""

    kind: Family
    vllm_name: str | None  # after "vllm:"
    help: str


class HistogramNames(NamedTuple):
    """A histogram of `ServerMetrics`."""

    attribute: str
    vllm_name: str | None
    help: str
    bounds: str | None = None  # family of `Bounds` with vLLM's; None: the same as ours


# both by name after "qinfer_"
NUMBERS: Mapping[str, NumberNames] = {
    "requests_running": NumberNames(GAUGE, "num_requests_running", "Sequences being computed."),
    "requests_waiting": NumberNames(GAUGE, "num_requests_waiting", "Requests waiting for a place."),
    "kv_cache_usage_ratio": NumberNames(GAUGE, "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."),
    "kv_cache_capacity_tokens": NumberNames(GAUGE, None, "Tokens that the KV pages hold."),
    "kv_cache_capacity_sequences": NumberNames(GAUGE, None, "Longest sequences that the KV pages hold."),
    "kv_cache_capacity_unquantized_tokens": NumberNames(
        GAUGE, None, "Tokens that the unquantized model's KV pages would hold in this memory."
    ),
    "kv_cache_bytes": NumberNames(GAUGE, None, "Memory of the KV pages."),
    "model_weight_bytes": NumberNames(GAUGE, None, "Memory of the weights."),
    "engine_ready": NumberNames(GAUGE, None, "1 while the engine takes requests, else 0."),
    "prompt_tokens": NumberNames(COUNTER, "prompt_tokens", "Prompt tokens, cached ones too."),
    "cached_prompt_tokens": NumberNames(COUNTER, "prompt_tokens_cached", "Prompt tokens not recomputed."),
    "generation_tokens": NumberNames(COUNTER, "generation_tokens", "Tokens generated."),
    "preemptions": NumberNames(COUNTER, "num_preemptions", "Times a sequence gave its pages back."),
    "prefix_cache_queried_tokens": NumberNames(COUNTER, "prefix_cache_queries", "Prompt tokens looked up."),
    "prefix_cache_hit_tokens": NumberNames(COUNTER, "prefix_cache_hits", "Prompt tokens found cached."),
}

HISTOGRAMS: Mapping[str, HistogramNames] = {
    "time_to_first_token_seconds": HistogramNames(
        "first_token", "time_to_first_token_seconds", "Arrival to the first token.", "time_to_first_token"
    ),
    "inter_token_latency_seconds": HistogramNames(
        "inter_token",
        "inter_token_latency_seconds",
        "Gaps between the tokens of a choice.",
        "inter_token_latency",
    ),
    "time_per_output_token_seconds": HistogramNames(
        "per_token", "request_time_per_output_token_seconds", "A choice's mean gap.", "inter_token_latency"
    ),
    "request_latency_seconds": HistogramNames(
        "latency", "e2e_request_latency_seconds", "Arrival to the end."
    ),
    "request_queue_seconds": HistogramNames(
        "queue", "request_queue_time_seconds", "Queued to first scheduled."
    ),
    "request_prefill_seconds": HistogramNames(
        "prefill", "request_prefill_time_seconds", "Scheduled to first token."
    ),
    "request_decode_seconds": HistogramNames("decode", "request_decode_time_seconds", "First token to last."),
    "request_inference_seconds": HistogramNames(
        "inference", "request_inference_time_seconds", "Scheduled to last token."
    ),
    "step_tokens": HistogramNames(
        "step_tokens", "iteration_tokens_total", "Prompt tokens computed and tokens generated in a step."
    ),
    "step_batch_size": HistogramNames("step_sequences", None, "Sequences in a step."),
    "request_prompt_tokens": HistogramNames(
        "request_prompt_tokens", "request_prompt_tokens", "Prompt tokens."
    ),
    "request_computed_prompt_tokens": HistogramNames(
        "request_computed_tokens", "request_prefill_kv_computed_tokens", "Prompt tokens not found cached."
    ),
    "request_generation_tokens": HistogramNames(
        "request_generation_tokens", "request_generation_tokens", "Generated tokens of all choices."
    ),
    "request_max_generation_tokens": HistogramNames(
        "request_longest", "request_max_num_generation_tokens", "Generated tokens of the longest choice."
    ),
    "request_max_tokens": HistogramNames(
        "request_max_tokens", "request_params_max_tokens", "max_tokens that were asked for."
    ),
    "request_n": HistogramNames("request_n", "request_params_n", "Choices that were asked for."),
    "request_preemptions": HistogramNames(
        "request_preemptions", "request_num_preemptions", "Times the request's sequences gave pages back."
    ),
}
