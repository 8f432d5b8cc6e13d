"""The server as a process: port first, 503 while loading, one line when ready, a clean end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.sampling_params import SamplingParams
from qinfer.server.waiting import LoadingAnswers, listen
from qinfer.testing import wait_until

SERVE = """
import sys, time
from qinfer.server.run import serve

def load():
    if len(sys.argv) > 2:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(600)
    from qinfer import backend
    from qinfer.llm import LLM
    backend.fallbacks["rms_norm", 'rows "too" long'] = 3
    return LLM(sys.argv[1], served_model_name="tiny", num_kv_blocks=256)

serve(load, port=0)
"""


def test_a_real_engine_serves_streams_and_ends_with_zero(model_dir, start):
    process = start("-c", SERVE, str(model_dir))
    url = process.url()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    (child,) = process.children()
    body = {"prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True, "logprobs": 5}
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        source = answer.iter_lines()
        lines.append(next(source))
        process.send(signal.SIGTERM)
        lines.extend(source)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.exit_code() == 0
    assert not Path(f"/proc/{child}").exists()
    listen("127.0.0.1", int(url.rsplit(":", 1)[1])).close()  # free at once
    assert process.said == [f"tiny is served at {url}/v1 (dense weights: no verdict needed)\n"]


def test_ops_without_a_kernel_are_counted_where_they_run_and_told_where_they_are_asked_for(model_dir, start):
    process = start("-c", SERVE, str(model_dir))
    families = text_string_to_metric_families(httpx.get(f"{process.url()}/metrics", timeout=60).text)
    (family,) = (one for one in families if one.name == "qinfer_kernel_fallbacks")
    labels = {"model_name": "tiny", "op": "rms_norm", "reason": 'rows "too" long'}
    assert [(sample.labels, sample.value) for sample in family.samples] == [(labels, 3)]


def test_what_an_engine_elsewhere_answers_is_what_one_here_does(model_dir, start):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    (expected,) = LLM(str(model_dir), num_kv_blocks=256).generate("Hello", params, use_tqdm=False)
    process = start("-c", SERVE, str(model_dir))
    with httpx.Client(base_url=process.url(), timeout=60) as client:

        def ask(path: str = "completions", **more: Any) -> httpx.Response:
            body = {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
            return client.post(f"/v1/{path}", json=body)

        (choice,) = ask(logprobs=2, return_token_ids=True).json()["choices"]
        assert (choice["text"], choice["token_ids"]) == (
            expected.outputs[0].text,
            expected.outputs[0].token_ids,
        )
        found = choice["logprobs"]["token_logprobs"]
        ids, logprobs = expected.outputs[0].token_ids, expected.outputs[0].logprobs
        assert found == pytest.approx(
            [one[t].logprob for t, one in zip(ids, logprobs, strict=True)], abs=1e-4
        )
        several = ask(n=3, temperature=1.0, seed=1).json()["choices"]
        assert [one["finish_reason"] for one in several] == ["length"] * 3
        form = {"regex": "(ab){3}"}
        assert ask(structured_outputs=form, ignore_eos=False).json()["choices"][0]["text"] == "ababab"
        refused = ask(structured_outputs={"regex": "("})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)
        assert "l" not in ask(bad_words=["l"], max_tokens=40).json()["choices"][0]["text"]
        assert ask(bad_words=[""]).status_code == 400
        (vector,) = client.post("/v1/embeddings", json={"input": "Hello"}).json()["data"]
        assert sum(x * x for x in vector["embedding"]) == pytest.approx(1, abs=1e-4)
        stats = client.get("/qinfer/stats").json()
        assert stats["kv"]["pages"] is not None
        assert (stats["requests"]["running"], stats["requests"]["waiting"]) == (0, 0)
        assert stats["requests"]["finished"] == {"length": 5, "stop": 1, "abort": 0, "error": 0}


def test_clients_that_leave_give_an_engine_elsewhere_back_what_they_held(model_dir, start):
    process = start("-c", SERVE, str(model_dir))
    url = process.url()
    body = {"prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True, "n": 2}
    with contextlib.ExitStack() as clients:
        for i in range(20):
            stream = httpx.stream("POST", f"{url}/v1/completions", json={**body, "seed": i}, timeout=60)
            clients.enter_context(stream)

    def is_idle() -> bool:
        stats = httpx.get(f"{url}/qinfer/stats", timeout=60).json()
        counts = (stats["requests"]["running"], stats["requests"]["waiting"], stats["kv"]["usage"])
        return counts == (0, 0, 0) and sum(stats["requests"]["finished"].values()) == 40

    wait_until(is_idle)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_h11_a_signal_ends_loading_at_once(start, number):
    process = start("-c", SERVE, "nowhere", "slowly")
    process.wait_for("loading")
    (child,) = process.children()
    process.send(number)
    assert process.exit_code() == 0  # and not after the ten minutes that loading takes
    assert not Path(f"/proc/{child}").exists()
    assert process.said == ["loading\n"]


LOAD = """
import os, time
from qinfer.errors import UserError
from qinfer.server.run import serve

class Odd(Exception):  # pickled, but not unpickled
    def __init__(self, a, b):
        super().__init__(f"odd {{a}} {{b}}")

def load():
    {}

serve(load, port=0, meanwhile=lambda: time.sleep(10**6))  # which the child's end breaks off
"""


@pytest.mark.parametrize(
    ("load", "code", "said"),
    [
        ("raise UserError('no such model', 'model')", 1, "qinfer.errors.UserError: no such model"),
        ("raise ZeroDivisionError('a bug')", 1, "in load\n"),
        ("os._exit(7)", 1, "EngineDeadError: loading the model has ended its process (exit code 7)\n"),
        ("os.kill(os.getpid(), 9)", 1, "(signal 9), as happens where memory runs out: `qinfer plan`"),
        ("raise Odd(1, 2)", 1, "RuntimeError: Odd: odd 1 2\n"),
    ],
)
def test_what_loading_raises_is_raised(start, load, code, said):
    process = start("-c", LOAD.format(load))
    assert process.exit_code() == code
    assert said in "".join(process.said)


CLOSED = """
import os, sys
os.closerange(0, 3)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_server_started_without_standard_streams_serves_and_ends_with_zero(model_dir, start):
    with socket.socket() as kept:  # bound only: the port is the server's to listen on, and nobody else's
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        process = start("-c", CLOSED, "-m", "qinfer", "serve", str(model_dir), "--port", str(port))
        answers: list[httpx.Response] = []

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                answers.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=60))
            return process.popen.poll() is not None or bool(answers and answers[-1].status_code == 200)

        wait_until(is_ready)
        (child,) = process.children()
        for pid in (process.popen.pid, child):
            streams = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
            assert streams == [os.devnull] * 3
        body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        process.send(signal.SIGTERM)
        assert process.exit_code() == 0


FEW_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_connections_beyond_the_limit_on_files_wait_and_are_told_in_a_line(start):
    process = start("-c", FEW_FILES, str(Path(__file__).with_name("stub_server.py")), "{}", "unused")
    url = process.url()
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    with contextlib.ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(socket.create_connection(address))
        process.wait_for("connections wait: Too many open files (at most 64 files")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": [97], "max_tokens": 3}, timeout=None)
    assert answer.json()["choices"][0]["text"] == "xxx"
    process.send(signal.SIGTERM)
    assert process.exit_code() == 0
    assert "socket.accept()" not in "".join(process.said)


WALKED = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from stub_server import load
from qinfer.server.run import serve
def say(url, card):
    walked, frozen = len(gc.get_objects()), gc.get_freeze_count()
    print("the collector walks through few:", walked < 0.1 * frozen, file=sys.stderr, flush=True)
serve(load, port=0, on_ready=say)
"""


def test_the_collector_does_not_walk_through_what_a_server_has_loaded(start):
    process = start("-c", WALKED, str(Path(__file__).parent))
    assert process.wait_for("walks through few").endswith("True\n")
    process.send(signal.SIGTERM)
    assert process.exit_code() == 0


def test_a_taken_port_is_one_line_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            listen("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    assert caught.value.parameter == "port"
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.1:0: .*; --host takes an address"):
        listen("203.0.113.1", 0)
    with pytest.raises(UserError, match="cannot listen on 'no such host':0: "):
        listen("no such host", 0)


class Flaky:
    """A listening socket that cannot accept its first connections."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._errors = [ConnectionAbortedError(), OSError(errno.EMFILE, "Too many open files")]

    def settimeout(self, seconds: float) -> None:
        self._listener.settimeout(seconds)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            raise self._errors.pop()
        return self._listener.accept()


def test_503_while_loading_also_after_a_connection_that_could_not_be_accepted():
    with listen("127.0.0.1", 0) as listener, LoadingAnswers(cast(socket.socket, Flaky(listener))):
        answer = httpx.get(f"http://127.0.0.1:{listener.getsockname()[1]}/health", timeout=60)
    assert answer.status_code == 503


def test_503_while_loading_and_the_socket_lives_on():
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with LoadingAnswers(listener):
            with pytest.raises(UserError, match="taken"):
                listen("127.0.0.1", listener.getsockname()[1])
            silent = socket.create_connection(listener.getsockname())
            silent.close()
            for answer in (
                httpx.get(f"{url}/health", timeout=60),
                httpx.post(f"{url}/v1/completions", json={"prompt": "a"}),
            ):
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["message"] == "the model is loading"
        with socket.create_connection(listener.getsockname()):
            listener.settimeout(5)
            listener.accept()[0].close()
