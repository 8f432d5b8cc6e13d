"""How a server ends: draining, cut off, at once, with its engine, killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.errors import UserError
from qinfer.server import ending
from qinfer.server.options import ServerOptions
from qinfer.server.waiting import listen
from qinfer.testing import wait_until

PROMPT, DEADLY, ENDLESS, HELD = [97], [1], [2], [3]


class Stream(threading.Thread):
    """Reads one stream to its end, or to where it breaks off; `lines` are its events so far."""

    def __init__(self, url: str, prompt: list[int]) -> None:
        super().__init__()
        self.url, self.lines = url, list[str]()
        self.body = {"prompt": prompt, "max_tokens": 4000, "stream": True}
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=None) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)

    def chunks(self) -> list[dict[str, Any]]:
        """What the stream has said, once it has ended in order."""
        self.join()
        assert self.lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]


def lives(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_h11_sigterm_lets_streams_end_and_nobody_in(start_stub, tmp_path):
    process = start_stub(shutdown_timeout=600)
    url = process.url()
    streams = [Stream(url, HELD), Stream(url, HELD)]
    wait_until(lambda: all(stream.lines for stream in streams))
    process.send(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
    assert httpx.get(f"{url}/ping", timeout=60).json()["error"]["message"] == "the server is shutting down"
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    (tmp_path / "release").touch()
    for stream in streams:
        choices = [chunk["choices"][0] for chunk in stream.chunks()]
        assert set("".join(choice["text"] for choice in choices)) == {"x"}
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert process.exit_code() == 0
    listen("127.0.0.1", int(url.rsplit(":", 1)[1])).close()  # free at once


def test_h11_what_outlasts_the_patience_ends_with_an_error(start_stub):
    process = start_stub(shutdown_timeout=0.5)
    stream = Stream(process.url(), HELD)
    wait_until(lambda: stream.lines)
    (child,) = process.children()
    process.send(signal.SIGINT)
    assert stream.chunks()[-1]["error"]["code"] == 503
    assert process.exit_code() == 0
    assert not lives(child)


def test_clients_that_do_not_read_are_cut_off_without_a_traceback(start_stub):
    process = start_stub()
    url = process.url()

    def num_answered() -> list[str]:
        return re.findall(r'qinfer_http_requests_total{handler="none".*', httpx.get(f"{url}/metrics").text)

    def is_stalled() -> bool:
        before = num_answered()
        time.sleep(0.5)
        return bool(before) and before == num_answered()

    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
        wait_until(is_stalled)
        process.send(signal.SIGTERM)
        assert process.exit_code() == 0
    assert not [line for line in process.said if "Traceback" in line or "Cancel" in line]


def test_the_second_signal_leaves_at_once(start_stub):
    process = start_stub(shutdown_timeout=600)
    url = process.url()
    stream = Stream(url, HELD)
    wait_until(lambda: stream.lines)
    process.send(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
    process.send(signal.SIGTERM)
    assert process.exit_code() == 0
    stream.join()
    assert stream.lines[-1] != "data: [DONE]"


def test_h14_a_dead_engine_ends_the_process_with_one(start_stub):
    process = start_stub(shutdown_timeout=600)
    url = process.url()
    stream = Stream(url, HELD)
    wait_until(lambda: stream.lines)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": DEADLY}, timeout=None)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the engine has died; the server must be restarted"
    assert process.exit_code() == 1
    assert stream.chunks()[-1]["error"]["code"] == 500
    assert "the engine has died" in "".join(process.said)
    assert ending.DEATH_SHOWS < ending.DEATH_LAST < 5  # seconds until a supervisor knows, whatever hangs


def test_h14_a_killed_engine_is_a_dead_one(start_stub):
    process = start_stub(shutdown_timeout=600)
    stream = Stream(process.url(), HELD)
    wait_until(lambda: stream.lines)
    (child,) = process.children()
    os.kill(child, signal.SIGKILL)
    assert process.exit_code() == 1
    assert stream.chunks()[-1]["error"]["code"] == 500
    assert "the engine has died (signal 9)" in "".join(process.said)


def test_a_step_without_end_does_not_keep_the_process(start_stub):
    process = start_stub()
    url = process.url()
    Stream(url, ENDLESS)
    process.wait_for("in a step without end")
    stats = httpx.get(f"{url}/qinfer/stats", timeout=60).json()
    assert (stats["state"], stats["kv"]["pages"]) == ("ready", None)
    (child,) = process.children()
    process.send(signal.SIGTERM)
    assert process.exit_code() == 0
    wait_until(lambda: not lives(child))
    assert ": leaving without it" in "".join(process.said)  # of the step, or of all where that is late


def stop_and_ask(url: str, child: int, clients: contextlib.ExitStack) -> None:
    """Stops the engine's process, then asks for more than a pipe holds."""
    os.kill(child, signal.SIGSTOP)
    body = json.dumps({"prompt": [PROMPT * 1000] * 300, "max_tokens": 1000}).encode()
    client = clients.enter_context(socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))))
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
    client.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(
        lambda: re.search(
            r"\nvllm:num_requests_waiting\{.*\} 300.0\n", httpx.get(f"{url}/metrics", timeout=60).text
        )
    )


@pytest.mark.parametrize(
    ("patience", "numbers", "code"),
    [
        (0, [signal.SIGTERM], 0),
        (600, [signal.SIGTERM, signal.SIGINT], 0),
        (0, [signal.SIGKILL], -signal.SIGKILL),
    ],
)
def test_a_stopped_engine_keeps_nobody_from_leaving(start_stub, patience, numbers, code):
    process = start_stub(shutdown_timeout=patience)
    url = process.url()
    (child,) = process.children()
    with contextlib.ExitStack() as clients:
        stop_and_ask(url, child, clients)
        assert httpx.get(f"{url}/health", timeout=60).status_code in (200, 503)  # 503 after half a minute
        process.send(numbers[0])
        for number in numbers[1:]:
            wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
            process.send(number)
        assert process.exit_code() == code
    wait_until(lambda: not lives(child))


IMPATIENT = """
import runpy, sys
from qinfer import pulse
pulse.BEAT, pulse.SILENCE = 0.05, 4
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_h14_an_engine_that_does_not_run_is_told_until_it_does(start, tmp_path):
    script = str(Path(__file__).with_name("stub_server.py"))
    process = start("-c", IMPATIENT, script, "{}", str(tmp_path / "release"))
    url = process.url()
    (child,) = process.children()

    def told() -> tuple[int, str]:
        health = httpx.get(f"{url}/health", timeout=60)
        (ready,) = re.findall(
            r"\nqinfer_engine_ready\{.*\} (.*)\n", httpx.get(f"{url}/metrics", timeout=60).text
        )
        return health.status_code, ready

    wait_until(lambda: told() == (200, "1.0"))
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
    assert told() == (503, "0.0")
    assert httpx.get(f"{url}/qinfer/stats", timeout=60).json()["state"] == "silent"
    message = httpx.get(f"{url}/health", timeout=60).json()["error"]["message"]
    assert message == "the engine's process gives no sign of life: is it stopped or frozen?"
    os.kill(child, signal.SIGCONT)
    wait_until(lambda: told() == (200, "1.0"))
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}, timeout=None)
    assert answer.json()["choices"][0]["text"] == "xxx"


def test_h11_a_killed_server_leaves_no_child_and_a_free_port(start_stub):
    process = start_stub()
    url = process.url()
    stream = Stream(url, HELD)
    wait_until(lambda: stream.lines)
    (child,) = process.children()
    process.send(signal.SIGKILL)
    assert process.exit_code() == -signal.SIGKILL
    wait_until(lambda: not lives(child))
    listen("127.0.0.1", int(url.rsplit(":", 1)[1])).close()


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_patience_is_a_number_of_seconds(seconds):
    with pytest.raises(UserError, match="shutdown_timeout"):
        ServerOptions(shutdown_timeout=seconds)
