"""`qinfer serve` as a process: ready document, one answer, a clean end; and what it refuses at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qinfer import LLM, SamplingParams, jobs
from qinfer.server.options import ServerOptions
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("serve") / "model")


@contextmanager
def served(model: Path, *options: str) -> Iterator[dict[str, Any]]:
    """The document that a serving process tells when it is ready; its end must be clean, and silent."""
    command = [sys.executable, "-m", "qinfer", "serve", str(model), "--port", "0", "--json", *options]
    command += ["--memory", "1GiB", "--max-num-seqs", "4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as server:
        try:
            lines: list[str] = []
            while not lines or lines[-1] not in ("}\n", ""):  # "": it ended
                lines.append(server.stdout.readline())
            ready = json.loads("".join(lines))
            yield ready
        finally:
            server.send_signal(signal.SIGTERM)
        rest, ready["stderr"] = server.communicate(timeout=60)
    assert server.returncode == 0, ready["stderr"]
    assert rest == ""  # one document, and nothing after it


def ask(ready: dict[str, Any], path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{ready['url']}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_serve_tells_when_it_is_ready_answers_and_ends_cleanly(model):
    with served(model, "--served-model-name", "tiny") as ready:
        completion = ask(ready, "completions", model="tiny", prompt="hello", max_tokens=4, temperature=0)
    assert (ready["model"], ready["served_model_names"]) == ("tiny", ["tiny"])
    assert (ready["gate"]["state"], ready["max_model_len"]) == ("dense", 256)
    assert ready["ledger"]["budget"] == 2**30
    assert 1 <= completion["usage"]["completion_tokens"] <= 4
    assert "tiny is served at" in ready["stderr"]
    assert ready["stderr"].count("dense weights: no verdict needed") == 1
    assert "KV pool" in ready["stderr"]


def test_q25_what_quantize_wrote_answers_a_chat_without_its_source(tmp_path):
    source = tiny_model("qwen3", tmp_path / "source", dtype="bfloat16")
    out = jobs.quantize(str(source), tmp_path / "out", scheme="fp8", gate=False, progress=False).out
    source.rename(tmp_path / "moved away")
    messages = [{"role": "user", "content": "Which  files does a server need?"}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (expected,) = LLM(str(out), allow_ungated=True).chat(messages, params)
    with served(out, "--allow-ungated", "--served-model-name", "out") as ready:
        options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        chat = ask(ready, "chat/completions", model="out", messages=messages, **options)
    assert ready["stderr"].count("served without a valid verdict of the gate") == 1
    assert chat["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert chat["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert chat["usage"]["completion_tokens"] == 6


def test_a_taken_port_is_one_line_before_anything_is_loaded(qinfer, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, out, err = qinfer("serve", model, "--port", taken.getsockname()[1])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_dummy_weights_are_served_only_when_asked_and_with_a_tokenizer(qinfer, model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    code, out, err = qinfer("serve", tmp_path, "--port", 0, "--load-format", "dummy")
    assert (code, out) == (1, "")
    assert "--allow-ungated" in err
    code, out, err = qinfer("serve", tmp_path, "--port", 0, "--load-format", "dummy", "--allow-ungated")
    assert (code, out) == (2, "")
    assert "--tokenizer" in err


def test_m01_weights_beyond_the_budget_stop_the_start(qinfer, model):
    code, out, err = qinfer("serve", model, "--port", 0, "--memory", "100KiB")
    assert (code, out) == (2, "")
    assert "memory budget is 100.0 KiB" in err


def test_s08_contradicting_limits_stop_the_start(qinfer, model):
    options = ("--max-num-batched-tokens", 64, "--no-enable-chunked-prefill", "--max-model-len", 256)
    code, out, err = qinfer("serve", model, "--port", 0, "--max-num-seqs", 8, *options)
    assert (code, out) == (2, "")
    assert "max_num_batched_tokens 64 is below max_model_len 256" in err


def test_options_of_the_server_arrive(qinfer, monkeypatch, model):
    arrived = []
    monkeypatch.setattr("qinfer.server.run.serve", lambda load, options, **more: arrived.append(options))
    told = {
        "--api-key": "key",
        "--allowed-origins": "https://a.example",
        "--max-body-mb": "3",
        "--sse-keep-alive-interval": "2.5",
        "--tool-call-parser": "hermes",
        "--metrics-compat": "none",
        "--max-num-queued-reqs": "7",
        "--max-num-queued-tokens": "1000",
        "--shutdown-timeout": "30",
    }
    words = [word for pair in told.items() for word in pair]
    words += ["--enable-force-include-usage", "--trust-request-chat-template"]
    words += ["--access-log", "--enable-log-requests"]
    assert qinfer("serve", model, *words).code == 0
    assert arrived == [
        ServerOptions(
            api_keys=["key"],
            allowed_origins=["https://a.example"],
            max_body_bytes=3 << 20,
            keep_alive_seconds=2.5,
            force_usage=True,
            trust_request_chat_template=True,
            tool_call_parser="hermes",
            metrics_compat="none",
            max_num_queued_reqs=7,
            max_num_queued_tokens=1000,
            shutdown_timeout=30.0,
            log_answers=True,
            log_requests=True,
        )
    ]
