"""The server as a process: port first, 503 while loading, one line when ready, a clean end."""

from __future__ import annotations

import signal
import socket
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
        time.sleep(600)
    from qinfer.llm import LLM
    return LLM(sys.argv[1], served_model_name="tiny", num_kv_blocks=256)

serve(load, port=0)
"""


def test_a_real_engine_serves_streams_and_ends_with_zero(model_dir, start):
    process = start("-c", SERVE, str(model_dir))
    url = process.url()
    assert httpx.get(f"{url}/health").status_code == 200
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_h11_a_signal_ends_loading_at_once(start, number):
    process = start("-c", SERVE, "nowhere", "slowly")
    process.wait_for("loading")
    process.send(number)
    assert process.exit_code() == 0  # and not after the ten minutes that loading takes
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
