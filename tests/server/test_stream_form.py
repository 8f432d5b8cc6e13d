"""The short ways by which streams are written say the same as the long ones."""

from __future__ import annotations

import json
from typing import Any

import h11
import pytest

from qinfer.server.chunking import ChunkingConnection
from qinfer.server.streaming import event
from qinfer.server.text_events import TextEvents
from qinfer.server.wire import Completion, CompletionChoice

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


def exchange(
    version: bytes, method: bytes, headers: list[tuple[str, str]], pieces: list[bytes]
) -> list[bytes]:
    """What the two connections send for the same answer; the last is a reader's view of ours."""
    sent = []
    for kind in (h11.Connection, ChunkingConnection):
        server = kind(h11.SERVER)
        server.receive_data(method + b" / HTTP/" + version + b"\r\nhost: a\r\n\r\n")
        while server.next_event() is not h11.NEED_DATA and server.their_state is not h11.DONE:
            pass
        server.next_event()
        out = server.send(h11.Response(status_code=200, headers=headers)) or b""
        for piece in pieces:
            out += server.send(h11.Data(data=piece)) or b""
        out += server.send(h11.EndOfMessage()) or b""
        sent.append(out)
        assert server.our_state in (h11.DONE, h11.MUST_CLOSE)
    return sent


@pytest.mark.parametrize("pieces", [[b"a" * 300, b"bc"], [b"", b"x", b""], []])
@pytest.mark.parametrize(
    ("version", "method", "headers"),
    [
        (b"1.1", b"GET", []),
        (b"1.0", b"GET", []),
        (b"1.1", b"GET", [("x-note", "transfer-encoding: chunked")]),
    ],
)
def test_pieces_are_framed_as_h11_frames_them(version, method, headers, pieces):
    theirs, ours = exchange(version, method, headers, pieces)
    assert ours == theirs


def test_a_known_length_is_not_chunked_and_is_held_to():
    theirs, ours = exchange(b"1.1", b"GET", [("content-length", "3")], [b"ab", b"c"])
    assert ours == theirs
    assert ours.endswith(b"\r\n\r\nabc")
    with pytest.raises(h11.LocalProtocolError):
        exchange(b"1.1", b"GET", [("content-length", "1")], [b"ab"])


def test_a_head_has_no_body():
    theirs, ours = exchange(b"1.1", b"HEAD", [], [b""])
    assert ours == theirs
    assert ours.endswith(b"\r\n\r\n")
