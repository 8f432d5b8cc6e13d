"""Streams that meet trouble: stop strings, half characters, failures, clients that leave."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from qinfer.testing import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def spelled(served: Any, *pieces: str) -> list[int]:
    """Tokens of the pieces, each cut by itself, and the end of the sequence."""
    ids = [token for piece in pieces for token in served.engine.tokenizer.encode(piece)]
    return [*ids, max(served.engine.tokenizer.eos_token_ids)]


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"])


def begun(served: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request, which the engine has taken in."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    wait_until(lambda: served.scripted.jobs)
    return connection


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (("ABC", "DEF", "G", "HI", "J", "KL"), ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (("ABC", "DEFG", "X"), ["DEFGHIJ"], "ABCDEFGX", None),
        (("ABC", "DEFG"), ["DEFGHIJ"], "ABCDEFG", None),
        (("ABC", "DEF", "G"), ["DE", "DEF"], "ABC", "DE"),
        (("ABXYC",), "XY", "AB", "XY"),
    ],
)
def test_t03_stop_strings_never_leak(serve_scripted, pieces, stop, text, reason):
    with serve_scripted(script=lambda ids, k: spelled(served, *pieces)) as served:
        served.scripted.seconds_per_step = 0.002
        whole = served.post(COMPLETIONS, {"prompt": "x", "stop": stop, "max_tokens": 40}).json()["choices"][0]
        chunks = served.stream(COMPLETIONS, {"prompt": "x", "stop": stop, "max_tokens": 40})
    assert whole["text"] == text_of(chunks) == text
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == whole["finish_reason"] == "stop"
    assert last["stop_reason"] == whole["stop_reason"] == reason
    assert all(c["text"] or c["finish_reason"] for chunk in chunks for c in chunk["choices"])


@pytest.mark.parametrize(
    ("ends_well", "text", "echoed"), [(True, "€ok", "secret €ok"), (False, "ok", "secret ok")]
)
def test_t02_prompt_never_leaks_into_the_stream(serve_scripted, ends_well, text, echoed):
    """The prompt ends with two of a character's three bytes; the answer brings the third, or does not."""

    def script(ids: Sequence[int], choice: int) -> list[int]:
        return [*euro[2:], *spelled(served, "ok")] if ends_well else spelled(served, "ok")

    with serve_scripted(script=script) as served:
        tokenizer = served.engine.tokenizer
        by_byte = {tokenizer.token_bytes(i): i for i in range(256)}
        euro = [by_byte[bytes([byte])] for byte in "€".encode()]
        body = {"prompt": [*tokenizer.encode("secret "), *euro[:2]]}
        assert text_of(served.stream(COMPLETIONS, body)) == text
        assert text_of(served.stream(COMPLETIONS, {**body, "echo": True, "logprobs": 0})) == echoed
        assert served.post(COMPLETIONS, {**body, "echo": True}).json()["choices"][0]["text"] == echoed


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_h08_failure_at_the_first_step_is_a_500(serve_scripted, path):
    with serve_scripted() as served:
        served.scripted.fail_at_step = 0
        for stream in (True, False):
            body = {"prompt": "a", "messages": HELLO, "stream": stream}
            answer = served.post(path, body)
            assert answer.status_code == 500
            assert answer.headers["content-type"] == "application/json"
            assert "secret" not in answer.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_h08_failure_in_mid_stream_is_one_error_event(serve_scripted, path):
    with serve_scripted() as served:
        served.scripted.fail_at_step = 5
        served.scripted.seconds_per_step = 0.01
        answer = served.post(path, {"prompt": "a", "messages": HELLO, "stream": True, "max_tokens": 20})
        events = answer.text.split("\n\n")
    assert answer.status_code == 200
    assert events[-2:] == ["data: [DONE]", ""]
    errors = [json.loads(event.removeprefix("data: ")) for event in events[:-2] if '"error"' in event]
    assert len(errors) == 1
    assert events[-3].startswith('data: {"error"')
    assert errors[0]["error"]["code"] == 500
    assert "secret" not in answer.text


def test_h14_a_dead_engine_does_not_look_healthy(serve_scripted):
    with serve_scripted() as served:
        assert served.get("/health").status_code == 200
        served.scripted.fail_at_step = served.scripted.num_steps
        assert served.post(COMPLETIONS, {"prompt": "a"}).status_code == 500
        health = served.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["type"] == "ServiceUnavailableError"
        assert served.post(CHAT, {"messages": HELLO}).status_code == 500
        metrics = served.get("/metrics").text
        assert 'qinfer_engine_ready{model_name="tiny"} 0.0' in metrics
        assert 'qinfer_requests_finished_total{model_name="tiny",reason="error"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_leaves_aborts_its_request(serve_scripted, path, stream):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.01
        body = {"prompt": "a", "messages": HELLO, "stream": stream, "n": 2, "max_tokens": 200}
        with begun(served, path, body) as connection:
            if stream:
                received = b""
                while b"data: {" not in received:
                    received += connection.recv(4096)
            served.scripted.hold = True
        wait_until(lambda: not served.scripted.jobs)
        assert len(served.scripted.aborted) == 1
        wait_until(lambda: served.engine.stats.num_running == 0)
        finished = 'qinfer_requests_finished_total{model_name="tiny",reason="abort"} 2.0'
        assert finished in served.get("/metrics").text


def test_a_client_that_leaves_before_the_first_token(serve_scripted):
    with serve_scripted() as served:
        served.scripted.hold = True
        begun(served, CHAT, {"messages": HELLO, "stream": True, "max_tokens": 50}).close()
        wait_until(lambda: served.scripted.aborted and not served.scripted.jobs)


def test_sixty_four_streams_at_once(serve_scripted):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.002
        bodies = [{"prompt": f"prompt {i}", "max_tokens": 30} for i in range(64)]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            streams = list(pool.map(lambda body: served.stream(COMPLETIONS, body), bodies))
        for body, chunks in zip(bodies, streams, strict=True):
            ids = served.engine.tokenizer.encode(body["prompt"])
            assert text_of(chunks) == "".join(map(chr, served.scripted.script(ids, 0)[:30]))
        assert not served.scripted.jobs


@pytest.mark.parametrize("where", ["header", "body"])
def test_s13_two_live_requests_with_the_same_id(serve_scripted, where):
    headers = {"x-request-id": "same"} if where == "header" else {}
    body = {"prompt": "x", "max_tokens": 64, **({} if headers else {"request_id": "same"})}
    with concurrent.futures.ThreadPoolExecutor(2) as pool, serve_scripted() as served:
        served.scripted.hold = True
        first = pool.submit(served.post, COMPLETIONS, body, headers=headers)
        wait_until(lambda: len(served.scripted.jobs) == 1)
        second = pool.submit(served.post, COMPLETIONS, body, headers=headers)
        wait_until(lambda: len(served.scripted.jobs) == 2)  # both live, under ids of the server's own
        served.scripted.hold = False
        answers = [first.result(), second.result()]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [64, 64]
        metrics = served.get("/metrics").text
        assert served.get("/health").status_code == 200
    gauges = re.findall(r"^vllm:num_requests_(?:running|waiting)\S* (\S+)$", metrics, re.MULTILINE)
    assert gauges
    assert set(gauges) == {"0.0"}


def test_t11_many_threads_share_the_tokenizer(served):
    def prompt(i: int) -> str:
        return f"{i} " + "shared tokenizers must not change " * (1 + i % 7)

    def ask(i: int) -> list[int]:
        more = {"truncate_prompt_tokens": 5 + i} if i % 2 else {}
        body = {"prompt": prompt(i), "max_tokens": 1, "return_token_ids": True, **more}
        answer = served.post(COMPLETIONS, body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["prompt_token_ids"]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        found = list(pool.map(ask, range(64)))
    for i, ids in enumerate(found):
        whole = served.engine.tokenizer.encode(prompt(i))
        assert ids == (whole[-(5 + i) :] if i % 2 else whole)


def test_stopping_the_engine_ends_streams_with_an_error(serve_scripted):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.02
        with served.client.stream(
            "POST", COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 200}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert served.engine.shutdown()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
        refused = served.post(COMPLETIONS, {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert served.get("/health").status_code == 503


def test_comments_keep_a_silent_stream_alive(serve_scripted):
    with serve_scripted(keep_alive_seconds=0.05) as served:
        served.scripted.seconds_per_step = 0.01
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        with served.client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()
            said = [next(lines)]
            served.scripted.hold = True
            while said.count(": keep-alive") < 3:
                said.append(next(lines))
            served.scripted.hold = False
            said += lines
        events = [line for line in said if line and not line.startswith(":")]
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        whole = served.post(COMPLETIONS, {**body, "stream": False}).json()
    assert text_of(chunks) == whole["choices"][0]["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_operator_may_want_usage_in_every_stream(serve_scripted, path):
    with serve_scripted(force_usage=True) as served:
        chunks = served.stream(path, {"prompt": "a", "messages": HELLO, "max_tokens": 3})
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[-2:]] == [3, 3]
    assert all("usage" in chunk for chunk in chunks)
