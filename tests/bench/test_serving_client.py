"""The client against a server of canned bytes: what it takes for output, when, and what for a failure."""

import asyncio
import json

import pytest

from qinfer.bench.http_client import Address
from qinfer.bench.sample import Sample, Target, ask, since
from qinfer.bench.server_facts import Counters
from qinfer.errors import UserError

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"choices": [], "usage": {"completion_tokens": 7}}


def chunked(text):
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(chunk):
    return chunked(f"data: {json.dumps(chunk)}\n\n")


def text(piece):
    return event({"choices": [{"index": 0, "text": piece}]})


def delta(**said):
    return event({"choices": [{"index": 0, "delta": said}]})


DONE = chunked("data: [DONE]\n\n")
END = b"0\r\n\r\n"


def asked(*pieces, chat=False, pause=0.0, head=HEAD):
    """A sample of one request to a server that sends `pieces`, and what the server read."""
    seen = []

    async def answer(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in request.split(b"\r\n") if line.startswith(b"content-length"))
        seen.append((request, json.loads(await reader.readexactly(length))))
        for piece in (head.encode(), *pieces):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        writer.close()

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            target = Target(Address.of(f"http://127.0.0.1:{port}/base"), "/v1/x", chat, {"x-key": "k"})
            sample = Sample(3)
            await ask(target, target.body("hello", 9, {"model": "m", "top_k": 4}), sample, since(0.0))
            return sample

    sample = asyncio.run(run())
    return sample, *seen[0]


def test_a_completion_is_read():
    sample, head, body = asked(text("a"), text("b"), text(""), event(USAGE), DONE, END, pause=0.02)
    assert (sample.error, sample.text, sample.output_len) == ("", "ab", 7)
    assert len(sample.arrivals) == 3  # a chunk with a choice is output, whatever it spells
    assert sample.first_token >= 0.02  # after the head
    assert sample.latency >= 0.06
    assert sum(sample.gaps) == pytest.approx(sample.latency - sample.first_token)
    assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\n")
    assert b"\r\nx-key: k\r\n" in head
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"prompt": "hello", "max_tokens": 9, "model": "m", "top_k": 4, **streamed}


def test_the_role_of_a_chat_is_no_output():
    pieces = [delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta()]
    sample, _, body = asked(*pieces, event(USAGE), DONE, END, chat=True, pause=0.05)
    assert sample.text == "ab"
    assert len(sample.arrivals) == 3
    assert sample.first_token >= 0.1  # after head and role
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 9


def test_events_in_any_pieces():
    whole = "".join(f"data: {json.dumps({'choices': [{'text': c}]})}\n\n: comment\n\n" for c in "wörter")
    sample, _, _ = asked(*(chunked(whole[i : i + 7]) for i in range(0, len(whole), 7)), DONE, END)
    assert (sample.error, sample.text) == ("", "wörter")
    sample, _, _ = asked(chunked(whole.replace("\n", "\r\n")), DONE, END)
    assert (sample.error, sample.text) == ("", "wörter")


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([text("a"), END], "the stream ended without [DONE]"),
        ([text("a"), b"ff\r\nhalf"], "the answer ended early or is no HTTP"),
        ([DONE, END], "the answer has no output"),
        ([text("a"), event({"error": {"message": "broken"}}), DONE, END], "in the stream: broken"),
        ([chunked("data: {\n\n"), END], "the answer ended early or is no HTTP"),
    ],
)
def test_what_is_no_complete_answer(pieces, said):
    sample, _, _ = asked(*pieces)
    assert sample.error.startswith(said)
    assert not sample.ok


def test_an_error_is_told_with_its_status():
    head = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\n"
    sample, _, _ = asked(b"full", head=head)
    assert sample.error == "HTTP 503: full"


def test_no_server():
    async def run():
        async with await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
        sample = Sample(3)
        await ask(Target(Address.of(f"127.0.0.1:{port}"), "/x", False, {}), b"{}", sample, since(0.0))
        return sample

    assert asyncio.run(run()).error.startswith("no connection: ")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host", (False, "host", 80, "")),
        ("https://host/a/", (True, "host", 443, "/a")),
        ("host:8000", (False, "host", 8000, "")),
        ("http://[::1]:9", (False, "::1", 9, "")),
    ],
)
def test_addresses(url, address):
    assert Address.of(url) == address


@pytest.mark.parametrize("url", ["ftp://host", "http://host:port", "http://:80", ""])
def test_what_is_no_address(url):
    with pytest.raises(UserError, match="is no address such as"):
        Address.of(url)


def test_counters_are_summed_over_labels():
    before = Counters('qinfer_x_total{a="1"} 2.0\nqinfer_x_total{a="2"} 3.0\nqinfer_y 4.0\n')
    after = Counters(
        'qinfer_x_total{a="1"} 7.0\nqinfer_x_total{a="2"} 3.0\nother_total 5.0\n'
        'qinfer_model_info{quantization="w8a8-int8",weight_bits="8",group_size="0"} 1.0\n'
    )
    assert after.since(before) == {"qinfer_x_total": 5.0}
    assert after.about == {"quantization": "w8a8-int8", "weight_bits": "8"}
