"""`qinfer bench serve` on a server whose steps take a known time: counts exact, times as they must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qinfer.cli import main

STEP = 0.02
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")),
}


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], model_dir: Path) -> Any:
    """bench(url, words...) -> exit code, stdout, stderr."""

    def run(url: str, *words: object) -> tuple[int, str, str]:
        common = ("bench", "serve", "--base-url", url, "--tokenizer", model_dir, "--disable-tqdm")
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in (*common, *words)])
        return (left.value.code or 0, *capsys.readouterr())

    return run


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_what_clients_see(serve_scripted, bench, backend):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = STEP
        words = ("--backend", backend, "--num-prompts", 12, "--random-input-len", 5, "--random-output-len", 8)
        words += ("--max-concurrency", 4, "--goodput", "ttft:9999", "tpot:0.001", "--json")
        code, out, err = bench(served.url, *words)
    assert code == 0, err
    document = json.loads(out)
    assert document.keys() >= VLLM_KEYS
    assert (document["completed"], document["failed"]) == (12, 0)
    assert document["total_output_tokens"] == 12 * 8
    assert document["warmup"]["requests"] == 4
    assert document["model_id"] == "tiny"
    assert document["request_rate"] == "inf"
    # eight tokens take eight steps at least; what the machine adds has no bound
    assert document["mean_e2el_ms"] >= 8e3 * STEP
    assert document["mean_ttft_ms"] >= 1e3 * STEP
    decode = document["mean_e2el_ms"] - document["mean_ttft_ms"]
    assert document["mean_tpot_ms"] == pytest.approx(decode / 7)
    assert document["max_concurrent_requests"] >= 4
    assert document["steady_state"]["avg_concurrency"] <= 4.01
    assert document["mean_client_queue_time_ms"] > 0
    assert document["slo_attainment_by_metric"] == {"ttft": 1.0, "tpot": 0.0}
    assert document["slo_attainment"] == document["request_goodput"] == 0
    assert document["server_metrics"]["qinfer_generation_tokens_total"] == 12 * 8
    assert document["output_throughput"] == pytest.approx(96 / document["duration"])


def test_text_and_files(serve_scripted, bench, tmp_path):
    words = ("--num-prompts", 3, "--random-input-len", 5, "--random-output-len", 4, "--num-warmups", 0)
    words += ("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,90", "--metadata", "gpu=none")
    words += ("--append-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "x.jsonl")
    with serve_scripted() as served:
        for _ in range(2):
            code, out, err = bench(served.url, *words)
            assert code == 0, err
    assert "Successful requests:                     3" in out
    assert "P90 E2EL (ms):" in out
    assert "TPOT" not in out
    first, second = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    assert first["gpu"] == "none"
    assert first["output_lens"] == second["output_lens"] == [4, 4, 4]
    assert [len(gaps) for gaps in first["itls"]] <= [3, 3, 3]
    assert all(first["generated_texts"])
    assert first["generated_texts"] == second["generated_texts"]
    assert first["errors"] == [""] * 3
    assert first["p90_ttft_ms"] >= first["p50_ttft_ms"] > 0


def test_a_rate_is_kept(serve_scripted, bench):
    words = ("--num-prompts", 10, "--random-input-len", 3, "--random-output-len", 2, "--request-rate", 20)
    with serve_scripted() as served:
        code, out, err = bench(served.url, *words, "--burstiness", "inf", "--num-warmups", 0, "--json")
    assert code == 0, err
    assert json.loads(out)["duration"] >= 10 / 20


def test_probes_go_around_the_load_and_are_told_apart(serve_scripted, bench, tmp_path):
    words = ("--num-prompts", 6, "--random-input-len", 3, "--random-output-len", 10, "--max-concurrency", 1)
    words += ("--num-warmups", 0, "--probe-request-rate", 20, "--save-result", "--result-dir", tmp_path)
    with serve_scripted() as served:
        served.scripted.seconds_per_step = STEP
        code, out, err = bench(served.url, *words, "--result-filename", "x.json")
        generated = served.get("/qinfer/stats").json()["tokens"]["generation"]
    assert code == 0, err
    document = json.loads((tmp_path / "x.json").read_text())
    assert (document["completed"], document["total_output_tokens"]) == (6, 60)
    assert generated == 60 + document["probe_completed"]
    assert document["probe_failed"] == 0
    assert document["probe_completed"] >= 1  # the first is sent at once
    assert 1e3 * STEP <= document["probe_median_e2el_ms"] <= document["probe_max_e2el_ms"]
    assert f"{'Completed probes:':<40} {document['probe_completed']}" in out


def test_requests_that_fail_are_counted(serve_scripted, bench):
    words = ("--num-prompts", 2, "--random-input-len", 3, "--num-warmups", 0)
    with serve_scripted() as served:
        code, _, err = bench(served.url, *words, "--extra-body", '{"temperature": 9}')
    assert code == 2
    assert "every request failed; the first: HTTP 400" in err
    assert "temperature must be" in err


def test_a_server_that_records_itself(serve_scripted, bench):
    words = ("--num-prompts", 2, "--random-input-len", 3, "--random-output-len", 2, "--profile")
    with serve_scripted() as served:
        code, _, err = bench(served.url, *words)
        assert code == 2
        assert "answers 404 to /start_profile (QINFER_SERVER_DEV_MODE=1 opens it)" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--goodput", "ttft:x"), "say ttft:MS"),
        (("--backend", "grpc"), "one of openai, vllm, openai-chat"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--metadata", "x"), "must be NAME=VALUE"),
        (("--probe-request-rate", "inf"), "must be a number, 0 for none, not inf"),
        (("--metric-percentiles", "101"), "numbers from 0 to 100"),
        (("--percentile-metrics", "e2e"), "known are ttft, tpot, itl, e2el"),
        (("--save-result", "--result-dir", "/no/such/folder"), "there is no such folder"),
        (("--ready-check-timeout-sec", "0"), "does not answer: is it an OpenAI server, and up?"),
    ],
)
def test_mistakes_are_one_line(bench, words, said):
    code, out, err = bench("http://127.0.0.1:9", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_server_that_is_not_up_is_waited_for_and_that_is_told(bench, caplog):
    code, _, err = bench("http://127.0.0.1:9", "--ready-check-timeout-sec", "0.2")
    assert (code, err.count("\n")) == (2, 1)
    told = "127.0.0.1:9 is not there yet: waiting up to 0.2 s for it (--ready-check-timeout-sec)"
    assert caplog.messages == [told]
