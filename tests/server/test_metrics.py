"""/metrics: exact counts, two names for one number, and what promtool says."""

from __future__ import annotations

import subprocess

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qinfer.engine.options import EngineStats, StepCounts
from qinfer.live_request import Ask
from qinfer.output_parts import About
from qinfer.outputs import RequestStateStats
from qinfer.sampling_params import SamplingParams
from qinfer.server.histogram import FIRST_TOKEN, PER_TOKEN, Histogram, token_bounds
from qinfer.server.metrics import ServerMetrics

R, M = 3, 5
COMPLETIONS = "/v1/completions"


def samples(url: str) -> dict[str, float]:
    """Every sample by name and labels, without `model_name` and `engine`."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def test_exact_counts_of_requests_one_after_another(serve_scripted):
    with serve_scripted() as served:
        prompt = list(range(97, 104))
        for _ in range(R):
            served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": M, "ignore_eos": True})
        found = samples(served.url)
    p = len(prompt)
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_time_per_output_token_seconds",
        "request_params_max_tokens",
        "request_params_n",
    ):
        assert found[f"vllm:{name}_count"] == R, name
    assert found["vllm:inter_token_latency_seconds_count"] == R * (M - 1)
    assert found["vllm:request_prompt_tokens_sum"] == R * p
    assert found["vllm:request_generation_tokens_sum"] == R * M
    assert found["vllm:iteration_tokens_total_sum"] == R * (p + M)
    assert found["vllm:iteration_tokens_total_count"] == R * M
    assert found["vllm:prompt_tokens_total"] == R * p
    assert found["vllm:generation_tokens_total"] == R * M
    assert found["vllm:request_success_total{'finished_reason': 'length'}"] == R
    assert found["vllm:request_success_total{'finished_reason': 'stop'}"] == 0
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
        assert found[f"qinfer_{name}"] == 0


def test_a_request_that_ends_without_a_token_has_no_time_to_its_first():
    metrics, ask = ServerMetrics(256), Ask("r", [97, 98], SamplingParams(), arrival=1000.0)
    metrics.added(ask)
    times = RequestStateStats(queued_ts=1000.0, scheduled_ts=1000.5)
    about = About(None, 0, times, None, finished=True)
    stats = EngineStats(0, 0, 0.0, 4096, 0, 2, 0, 0, 0, 0, StepCounts(2, 0, 1, 0))
    metrics.stepped([(ask.number, ([(0, "", [], None, None, "error", None)], about))], stats, 1001.0, 0.5)
    for of_tokens in ("first_token", "inter_token", "prefill", "decode", "inference"):
        histogram = getattr(metrics, of_tokens)
        assert (sum(histogram.counts), histogram.sum) == (0, 0.0), of_tokens
    assert (metrics.latency.sum, metrics.queue.sum, metrics.request_prompt_tokens.sum) == (1.0, 0.5, 2.0)
    assert (metrics.finished["error"], metrics.prompt_tokens, metrics.recent[-1].first_token) == (1, 2, None)


def test_the_memory_ledger(serve_scripted):
    with serve_scripted() as served:
        found = samples(served.url)
    parts = {"budget": 1000, "weights": 300, "activations": 50, "graphs": 5, "reserve": 1, "kv_pool": 640}
    for part, value in parts.items():
        assert found[f"qinfer_memory_bytes{{'part': '{part}'}}"] == value
    assert found["qinfer_kv_cache_capacity_sequences"] == 2  # 40 pages of 16 tokens, 256 a sequence
    assert found["qinfer_kv_cache_capacity_unquantized_tokens"] == 160


def test_every_number_has_the_same_value_under_both_names(serve_scripted):
    pairs = {
        "requests_running": "num_requests_running",
        "requests_waiting": "num_requests_waiting",
        "kv_cache_usage_ratio": "kv_cache_usage_perc",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generation_tokens_total",
        "time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "request_latency_seconds_sum": "e2e_request_latency_seconds_sum",
    }
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.03
        body = {"prompt": "abc", "max_tokens": 100, "n": 3, "stream": True}
        with served.client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            found = samples(served.url)
    assert found["qinfer_requests_running"] == 3
    assert found["qinfer_kv_cache_usage_ratio"] > 0
    for ours, theirs in pairs.items():
        assert found[f"qinfer_{ours}"] == found[f"vllm:{theirs}"], ours


def test_vllm_keeps_its_bounds_and_ours_are_finer(serve_scripted):
    with serve_scripted() as served:
        found = samples(served.url)
    theirs = [name for name in found if name.startswith("vllm:inter_token_latency_seconds_bucket")]
    ours = [name for name in found if name.startswith("qinfer_inter_token_latency_seconds_bucket")]
    assert len(theirs) == len(PER_TOKEN) + 1
    assert len(ours) == len(theirs) + 6
    assert "qinfer_time_to_first_token_seconds_bucket{'le': '0.0005'}" in found
    assert (
        len([n for n in found if n.startswith("vllm:time_to_first_token_seconds_b")]) == len(FIRST_TOKEN) + 1
    )


def test_http_answers_are_counted_by_route(serve_scripted):
    with serve_scripted() as served:
        served.post(COMPLETIONS, {"prompt": "a"})
        served.post(COMPLETIONS, {"prompt": ""})
        served.get("/v1/models/a/b/c")
        served.get("/wp-login.php")
        served.client.request("BREW", "/wp-login.php")
        found = samples(served.url)
    name = "qinfer_http_requests_total"
    counted = {key.removeprefix(name): value for key, value in found.items() if key.startswith(name)}
    assert counted == {
        "{'handler': '/v1/completions', 'method': 'POST', 'status': '200'}": 1,
        "{'handler': '/v1/completions', 'method': 'POST', 'status': '400'}": 1,
        "{'handler': '/v1/models/{model_id:path}', 'method': 'GET', 'status': '404'}": 1,
        "{'handler': 'none', 'method': 'GET', 'status': '404'}": 1,
        "{'handler': 'none', 'method': 'other', 'status': '404'}": 1,
    }


def test_promtool_finds_nothing_to_say(serve_scripted):
    with serve_scripted(metrics_compat="none") as served:
        served.post(COMPLETIONS, {"prompt": "a", "n": 2})
        text = served.get("/metrics").text
    assert "vllm:" not in text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_vllm_names_are_valid_exposition(serve_scripted):
    with serve_scripted() as served:
        answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = [family.name for family in text_string_to_metric_families(answer.text)]
    assert len(names) == len(set(names))
    engine = "qinfer_engine_process_cpu_seconds"  # of the process that the engine is in
    assert {"vllm:num_requests_running", "vllm:iteration_tokens_total", "process_cpu_seconds", engine} <= {
        *names
    }


def test_two_apps_share_no_numbers(serve_scripted):
    with serve_scripted() as one, serve_scripted() as two:
        one.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3})
        assert samples(one.url)["qinfer_generation_tokens_total"] == 3
        assert samples(two.url)["qinfer_generation_tokens_total"] == 0


def test_histogram():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 7):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)]
    assert histogram.cumulative((1, 5)) == [("1.0", 2), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 15
    assert token_bounds(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    with pytest.raises(AssertionError):
        histogram.cumulative((3,))
