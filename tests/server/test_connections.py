"""Connections: those that owe a request are closed after a while; files that run out are told in a line."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from qinfer.server import connections, patience
from qinfer.server.connections import LoopErrors, raise_file_limit
from qinfer.server.protocol_errors import JsonH11

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Loop:
    """A clock that is set by hand, and the one timer a connection may have."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[SimpleNamespace] = []
        self.tasks: list[Any] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(at=self.now + seconds, call=call)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now]:
            timer.cancel()
            timer.call()

    def create_task(self, call: Any) -> asyncio.Future[None]:
        call.close()  # what an app would answer does not matter here
        return asyncio.get_running_loop().create_future()


class Transport:
    """A connection that keeps nothing but whether it is open."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.fixture
def connect() -> Callable[[], tuple[Loop, Transport, JsonH11]]:
    """Makes a connection; must be called where an event loop runs."""

    def make() -> tuple[Loop, Transport, JsonH11]:
        loop, transport = Loop(), Transport()
        config = uvicorn.Config(lambda: None, http=JsonH11, lifespan="off")
        protocol = JsonH11(config, ServerState(), {}, cast(asyncio.AbstractEventLoop, loop))
        protocol.connection_made(cast(asyncio.BaseTransport, transport))
        return loop, transport, protocol

    return make


def closed_after(
    connect: Callable[[], tuple[Loop, Transport, JsonH11]], *said: bytes, apart: float = 40, then: float = 0
) -> bool:
    """Whether the server has closed after a client has said this, so many seconds before each and at last."""

    async def talk() -> bool:
        loop, transport, protocol = connect()
        for data in said:
            loop.wait(apart)
            if not transport.closed:
                protocol.data_received(data)
        loop.wait(then)
        return transport.closed

    return asyncio.run(talk())


@pytest.mark.parametrize(
    ("said", "then", "closed"),
    [
        ([], 59, False),
        ([], 60, True),  # it asks nothing
        ([HEAD[:5]], 19, False),
        ([HEAD[:5]], 20, True),  # a head is due as a whole
        ([HEAD[:5], HEAD[5:9]], 0, True),
        ([HEAD], 59, False),
        ([HEAD], 60, True),  # the body does not come
        ([HEAD, b"a", b"b", b"c"], 59, False),
        ([HEAD, b"a", b"b", b"c"], 60, True),
        ([HEAD, b"a", b"b", b"cd"], 10**6, False),  # an answer may take any time
        ([HEAD + b"abcd"], 10**6, False),
    ],
)
def test_a_connection_may_owe_for_a_minute(connect, said, then, closed):
    assert patience.SECONDS == 60
    assert closed_after(connect, *said, then=then) is closed


def test_after_an_answer_a_head_is_due_as_a_whole_again(connect):
    async def talk() -> list[bool]:
        loop, transport, protocol = connect()
        protocol.data_received(HEAD + b"abcd")
        assert not loop.timers
        await protocol.cycle.send({"type": "http.response.start", "status": 200, "headers": []})
        await protocol.cycle.send({"type": "http.response.body"})
        seen = []
        for data, seconds in ((HEAD[:5], 40), (HEAD[5:], 59), (b"abcd", 10**6)):
            protocol.data_received(data)
            loop.wait(seconds)
            seen.append(transport.closed)
        return seen

    assert asyncio.run(talk()) == [False, False, False]


def test_files_that_run_out_are_told_once_a_minute(caplog):
    lines: list[str] = []
    told: list[dict[str, Any]] = []
    loop = SimpleNamespace(now=0.0, time=lambda: loop.now, default_exception_handler=told.append)
    errors = LoopErrors()
    full = OSError(errno.EMFILE, "Too many open files")
    with caplog.at_level(logging.WARNING, connections.__name__):
        for loop.now in (0.0, 0.1, 59.0, 60.0, 119.0):
            for _ in range(2048):
                errors(loop, {"message": "out of system resource", "exception": full, "socket": object()})
            lines.append(str(len(caplog.records)))
    assert lines == ["1", "1", "1", "2", "2"]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert (
        caplog.records[0]
        .getMessage()
        .startswith(f"connections wait: Too many open files (at most {limit} files")
    )
    assert not told
    others = [
        {"message": "a bug", "exception": ValueError()},
        {"message": "a bug", "exception": full},  # nobody's connection
        {"message": "gone", "exception": OSError(errno.EPIPE, "Broken pipe"), "socket": object()},
        {"message": "no exception at all"},
    ]
    for context in others:
        errors(loop, context)
    assert told == others


@pytest.mark.parametrize(
    ("found", "set_to"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (65536, 1 << 30)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((1 << 20, 1 << 30), None),
        ((64, 64), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_limit_on_files_is_raised_and_never_lowered(monkeypatch, found, set_to):
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: found)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: seen.append(limits))
    raise_file_limit()
    assert seen == ([] if set_to is None else [set_to])
