"""/metrics: what is told beside the counts: labels, what is served, HTTP answers, bounds, refusals, steps."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qinfer.async_llm import AsyncLLM
from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.server.app import build_app
from qinfer.server.door import Door
from qinfer.server.histogram import FIRST_TOKEN, LATENCY, parse_bounds, settle_bounds

PATIENCE = 120.0  # seconds
COMPLETIONS = "/v1/completions"
R, P, M = 3, 7, 5


def samples(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and labels."""
    text = httpx.get(f"{url}/metrics").text
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def labelled(found: Any, name: str, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
    """Samples of that name that have these labels, by their other labels."""
    own = frozenset(labels.items())
    return {more - own: value for (one, more), value in found.items() if one == name and own <= more}


def values(found: Any, name: str, key: str) -> dict[str, float]:
    return {dict(labels)[key]: value for labels, value in labelled(found, name).items()}


def test_every_label_is_there_from_the_start(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        found = samples(served.url)
    ends = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
    assert values(found, "qinfer_requests_finished_total", "reason") == ends
    assert values(found, "vllm:request_success_total", "finished_reason") == ends | {"repetition": 0}
    refusals = dict.fromkeys(("queue_full", "queued_tokens", "draining"), 0.0)
    for name in ("qinfer_requests_rejected_total", "vllm:admission_rejections_total"):
        assert values(found, name, "reason") == refusals
    phases = dict.fromkeys(("prefill", "decode", "mixed"), 0.0)
    for name in ("qinfer_engine_steps_total", "qinfer_step_duration_seconds_count"):
        assert values(found, name, "phase") == phases
    sources = dict.fromkeys(("local_compute", "local_cache_hit", "external_kv_transfer"), 0.0)
    assert values(found, "vllm:prompt_tokens_by_source_total", "source") == sources
    waiting = {"capacity": 0.0, "deferred": 0.0}
    assert values(found, "vllm:num_requests_waiting_by_reason", "reason") == waiting


def test_what_is_served(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        found = samples(served.url)
    (facts,) = labelled(found, "qinfer_model_info", model_name="tiny")
    assert dict(facts) == {
        "quantization": "w4a16+w8a8-int8",
        "weight_bits": "4+8",
        "group_size": "64",
        "kv_cache_dtype": "int8",
        "compute_dtype": "bfloat16",
        "backend": "torch",
    }
    (cache,) = labelled(found, "vllm:cache_config_info", model_name="tiny", engine="0")
    assert dict(cache) == {
        "block_size": "16",
        "num_gpu_blocks": "40",
        "kv_cache_size_tokens": "640",
        "cache_dtype": "int8",
        "enable_prefix_caching": "True",
    }
    label = frozenset({("model_name", "tiny")})
    assert found["qinfer_kv_cache_bytes", label] == 640
    assert found["qinfer_model_weight_bytes", label] == 300
    assert found["qinfer_engine_ready", label] == 1


def test_a_server_that_drains_is_not_ready(serve_scripted: Any) -> None:
    door = Door()
    with serve_scripted(door=door) as served:
        door.shut()
        assert served.post(COMPLETIONS, {"prompt": "a"}).status_code == 503
        found = samples(served.url)
    assert found["qinfer_engine_ready", frozenset({("model_name", "tiny")})] == 0
    assert values(found, "qinfer_requests_rejected_total", "reason")["draining"] == 1


def test_http_answers_as_vllm_counts_them(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        body = {"prompt": "a", "max_tokens": 2}
        sizes = [len(served.post(COMPLETIONS, body).content) for _ in range(2)]
        served.post(COMPLETIONS, {"prompt": ""})
        served.get("/health")
        samples(served.url)
        found = samples(served.url)
    counted = labelled(found, "http_requests_total")
    ours = {"handler": COMPLETIONS, "method": "POST"}
    assert counted == {
        frozenset((ours | {"status": "2xx"}).items()): 2,
        frozenset((ours | {"status": "4xx"}).items()): 1,
    }
    assert labelled(found, "http_request_duration_seconds_count", **ours) == {frozenset(): 3}
    assert labelled(found, "http_request_duration_highr_seconds_count") == {frozenset(): 3}
    assert labelled(found, "http_request_size_bytes_count") == {frozenset({("handler", COMPLETIONS)}): 3}
    assert sum(labelled(found, "http_response_size_bytes_sum").values()) > sum(sizes)
    assert sum(labelled(found, "http_request_size_bytes_sum").values()) == 2 * len(
        json.dumps(body, separators=(",", ":"))
    ) + len('{"prompt":""}')


def test_refusals_are_counted_by_what_is_full(fake_llm: Any, run_app: Any) -> None:
    engine = AsyncLLM(fake_llm, max_num_queued_reqs=4)
    fake_llm.engine.seconds_per_step = 0.05
    body = {"prompt": "a", "n": 4, "stream": True, "max_tokens": 200}
    try:
        with run_app(build_app(engine)) as url:
            with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=60) as answer:
                lines = answer.iter_lines()  # dropped, it would close the stream
                next(lines)
                assert httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "a"}).status_code == 503
            found = samples(url)
    finally:
        assert engine.shutdown(60)
    for name in ("qinfer_requests_rejected_total", "vllm:admission_rejections_total"):
        assert values(found, name, "reason") == {"queue_full": 1, "queued_tokens": 0, "draining": 0}


def test_exact_counts_of_a_real_engine(model_dir: Any, run_app: Any) -> None:
    """R requests one after another, P prompt and M answer tokens each: the rules of vLLM's own test."""
    engine = AsyncLLM(LLM(str(model_dir), served_model_name="tiny", num_kv_blocks=64))
    body = {"prompt": list(range(97, 97 + P)), "max_tokens": M, "ignore_eos": True, "temperature": 0}
    try:
        with run_app(build_app(engine)) as url:
            for _ in range(R):
                assert httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60).status_code == 200
            found = samples(url)
    finally:
        assert engine.shutdown(60)
    one = {name: value for (name, labels), value in found.items() if len(labels) <= 2}
    for name in (
        *("time_to_first_token", "request_latency", "request_queue", "request_prefill", "request_decode"),
        *("request_inference", "time_per_output_token"),
    ):
        assert one[f"qinfer_{name}_seconds_count"] == R, name
    for name in ("prompt_tokens", "computed_prompt_tokens", "generation_tokens", "max_generation_tokens"):
        assert one[f"qinfer_request_{name}_count"] == R
        assert one[f"qinfer_request_{name}_sum"] == R * (P if "prompt" in name else M), name
    assert one["qinfer_request_preemptions_count"] == R
    assert one["qinfer_request_preemptions_sum"] == 0
    assert one["qinfer_inter_token_latency_seconds_count"] == R * (M - 1)
    assert (one["qinfer_step_tokens_count"], one["qinfer_step_tokens_sum"]) == (R * M, R * (P + M))
    assert (one["qinfer_step_batch_size_count"], one["qinfer_step_batch_size_sum"]) == (R * M, R * M)
    steps = {"prefill": R, "decode": R * (M - 1), "mixed": 0}
    assert values(found, "qinfer_engine_steps_total", "phase") == steps
    assert (one["qinfer_prompt_tokens_total"], one["qinfer_generation_tokens_total"]) == (R * P, R * M)
    assert values(found, "qinfer_requests_finished_total", "reason") == {
        **{"length": R, "stop": 0, "abort": 0, "error": 0}
    }


def test_after_aborting_nothing_runs_waits_or_is_held(model_dir: Any, run_app: Any) -> None:
    engine = AsyncLLM(LLM(str(model_dir), served_model_name="tiny", num_kv_blocks=64, max_num_seqs=2))
    body = {"prompt": "abc", "max_tokens": 200, "n": 4, "stream": True, "ignore_eos": True}
    gauges = ("qinfer_requests_running", "qinfer_requests_waiting", "qinfer_kv_cache_usage_ratio")
    label = frozenset({("model_name", "tiny")})
    try:
        with run_app(build_app(engine)) as url:
            with httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=60) as answer:
                lines = answer.iter_lines()  # dropped, it would close the stream
                next(lines)
                asyncio.run(engine.pause_generation())
                found = samples(url)
                assert all(found[name, label] > 0 for name in gauges)
            end = time.monotonic() + PATIENCE
            while any((found := samples(url))[name, label] for name in gauges):
                assert time.monotonic() < end, found
        assert values(found, "qinfer_requests_finished_total", "reason")["abort"] == 4
    finally:
        assert engine.shutdown(60)


def test_bounds_may_be_chosen(serve_scripted: Any) -> None:
    chosen = parse_bounds('{"time_to_first_token": [0.2, 4], "request_tokens": [7]}')
    with serve_scripted(histogram_bounds=chosen) as served:
        found = samples(served.url)
    for prefix in ("qinfer_", "vllm:"):
        assert set(values(found, f"{prefix}time_to_first_token_seconds_bucket", "le")) == {
            "0.2",
            "4.0",
            "+Inf",
        }
        assert set(values(found, f"{prefix}request_prompt_tokens_bucket", "le")) == {"7.0", "+Inf"}
    bounds = settle_bounds(100, {})
    assert bounds.vllm.time_to_first_token == FIRST_TOKEN
    assert bounds.ours.request_latency == LATENCY
    assert min(bounds.ours.inter_token_latency) == 0.0005


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('{"ttft": [1]}', "no family 'ttft'; there are time_to_first_token, "),
        ('{"request_latency": []}', r"must be numbers that rise from above 0, not \[\]"),
        ('{"request_latency": [1, 1]}', "must be numbers that rise"),
        ('{"request_latency": [0, 1]}', "must be numbers that rise"),
        ('{"request_latency": [true]}', "must be numbers that rise"),
        ('{"request_latency": ["1"]}', "must be numbers that rise"),
        ('{"request_latency": [1, Infinity]}', "must be numbers that rise"),
    ],
)
def test_bounds_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_bounds(text)
