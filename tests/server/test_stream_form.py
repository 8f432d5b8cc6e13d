"""The short ways by which streams are written say the same as the long ones."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from qinfer.server.chunking import piece_writer
from qinfer.server.streaming import event
from qinfer.server.text_events import TextEvents
from qinfer.server.wire import Completion, CompletionChoice

PATIENCE = 60.0  # seconds
TEXTS = ["a", 'a "quoted" \\ /', "\n\r\t\b\f\x00\x1f\x7f", "é €  \U0001f600 �", "", "</script>"]


def chunk(text: str) -> Completion:
    choice = CompletionChoice(index=0, text=text, logprobs=None, finish_reason=None, stop_reason=None)
    return Completion(id='i"d', object="text_completion", created=1, model="{text}", choices=[choice])


@pytest.mark.parametrize("text", TEXTS)
def test_an_event_of_text_is_the_chunks_own(text):
    assert TextEvents(chunk).of(text) == event(chunk(text).json_text())


def told(chunks: list[dict[str, Any]]) -> tuple[dict[int, str], set[str]]:
    """The text of each choice, and the unfinished chunks with empty text, as JSON without ids."""
    texts: dict[int, str] = {}
    forms = set()
    for one in chunks:
        (choice,) = one["choices"]
        holder, key = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        texts[choice["index"]] = texts.get(choice["index"], "") + holder.get(key, "")
        for extra in ("token_ids", "prompt_token_ids"):
            choice.pop(extra, None), one.pop(extra, None)
        if choice["finish_reason"] is None:
            holder[key] = ""
            forms.add(json.dumps({**one, "id": "", "created": 0}))
    return texts, forms


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_plain_chunks_have_the_fields_of_those_that_say_more(serve_scripted, path):
    asked = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "n": 2, "temperature": 1.0}
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.005
        plain = told(served.stream(path, {**asked, "max_tokens": 12}))
        built = told(served.stream(path, {**asked, "max_tokens": 12, "return_token_ids": True}))
    assert plain == built
    assert [len(text) for text in plain[0].values()] == [12, 12]


def raw_answer(url: str, version: str, method: str, path: str) -> bytes:
    """All bytes of an answer, whose Date is left out."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(f"{method} {path} HTTP/{version}\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return re.sub(rb"date: [^\r]*\r\n", b"", answer)


@pytest.fixture(scope="module")
def pieces(run_app) -> Iterator[tuple[str, list[bool]]]:
    """A server of two pieces, which go by the extension where the path says so; and whether those did."""
    written: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"303")] if b"length" in scope["raw_path"] else []
        headers += [(b"x-note", b"transfer-encoding: chunked")] if b"note" in scope["raw_path"] else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"a" * 300, b"bcd"):
            if b"fast" in scope["raw_path"]:
                written.append(piece_writer(scope)(piece))
            if b"fast" not in scope["raw_path"] or not written[-1]:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
        assert not piece_writer(scope)(b"too late")

    with run_app(app) as url:
        yield url, written


@pytest.mark.parametrize(
    ("version", "method", "kind", "is_fast"),
    [
        ("1.1", "GET", "plain", True),
        ("1.0", "GET", "plain", False),
        ("1.1", "GET", "note", True),
        ("1.0", "GET", "note", False),
        ("1.1", "GET", "length", False),
        ("1.1", "HEAD", "length", False),
    ],
)
def test_pieces_are_framed_as_h11_frames_them(pieces, version, method, kind, is_fast):
    url, written = pieces
    written.clear()
    usual = raw_answer(url, version, method, f"/{kind}")
    assert written == []
    assert raw_answer(url, version, method, f"/{kind}/fast") == usual
    assert written == [is_fast, is_fast]
    assert usual.endswith(b"0\r\n\r\n") == is_fast
    assert (b"aaabcd" in usual, b"\r\n3\r\nbcd\r\n" in usual) == (not is_fast and method == "GET", is_fast)


def test_no_server_no_extension():
    assert not piece_writer({"type": "http"})(b"a")


def test_bytes_of_pieces_are_counted(serve_scripted):
    with serve_scripted() as served:
        answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 12, "stream": True})
        size, end = None, time.monotonic() + PATIENCE
        while size is None:  # the client has the end before it is counted
            assert time.monotonic() < end
            counts = served.get("/metrics").text
            size = re.search(r'http_response_size_bytes_sum{handler="/v1/completions"} (\S+)', counts)
    assert float(size[1]) == len(answer.content)
