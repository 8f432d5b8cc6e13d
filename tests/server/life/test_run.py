"""The server as a process: port first, 503 while loading, one line when ready, a clean end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from qinfer.errors import UserError
from qinfer.server.waiting import LoadingAnswers, listen

SERVE = """
import sys, time
from qinfer.server.run import serve

def load():
    if len(sys.argv) > 2:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    from qinfer.llm import LLM
    return LLM(sys.argv[1], served_model_name="tiny", num_kv_blocks=256)

serve(load, port=0)
"""


class Process:
    """The server's process with what it says on stderr."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.said.extend(self.popen.stderr)

    def wait_for(self, text: str) -> str:
        assert self.popen.stderr is not None
        end = time.monotonic() + 120
        while time.monotonic() < end and self.popen.poll() is None:
            for line in self.said:
                if text in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} in {self.said}")

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(30)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._reader.join()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_streams_and_ends_with_zero(model_dir, processes, number):
    process = Process(str(model_dir))
    processes.append(process)
    line = process.wait_for("is served at")
    url = line.split("is served at ")[1].split("/v1")[0]
    assert line == f"tiny is served at {url}/v1 (dense weights: no verdict needed)\n"
    assert httpx.get(f"{url}/health").status_code == 200
    assert children(process.popen.pid) == []
    body = {"prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True, "logprobs": 5}
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
        source = answer.iter_lines()
        lines.append(next(source))
        process.popen.send_signal(number)
        lines.extend(source)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.popen.wait(30) == 0
    port = int(url.rsplit(":", 1)[1])
    listen("127.0.0.1", port).close()  # free at once
    process.close()
    assert process.said == [line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_loading_at_once(processes, number):
    process = Process("nowhere", "slowly")
    processes.append(process)
    process.wait_for("loading")
    started = time.monotonic()
    assert process.end(number) == 0
    assert time.monotonic() - started < 10
    process.close()
    assert process.said == ["loading\n"]


def test_a_taken_port_is_one_line_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            listen("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    assert caught.value.parameter == "port"
    with pytest.raises(UserError, match="cannot listen on 203\\.0\\.113\\.1"):
        listen("203.0.113.1", 0)
    with pytest.raises(UserError, match="cannot listen on no such host"):
        listen("no such host", 0)


def test_503_while_loading_and_the_socket_lives_on():
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with LoadingAnswers(listener):
            with pytest.raises(UserError, match="taken"):
                listen("127.0.0.1", listener.getsockname()[1])
            silent = socket.create_connection(listener.getsockname())
            silent.close()
            for answer in (
                httpx.get(f"{url}/health"),
                httpx.post(f"{url}/v1/completions", json={"prompt": "a"}),
            ):
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["message"] == "the model is loading"
        with socket.create_connection(listener.getsockname()):
            listener.settimeout(5)
            listener.accept()[0].close()
