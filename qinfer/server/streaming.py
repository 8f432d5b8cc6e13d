"""Moving answers from the engine to a client that may leave at any moment.

`merge` reads several requests as one stream, `while_connected` gives up on work whose client has gone, and
`EventStream` sends server-sent events and closes its source when the client leaves, so that the engine's
request is aborted at once. A failure after the first byte is one error event and the end of the stream: HTTP
has no status left to give.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qinfer.errors import QinferError
from qinfer.server.chunking import WritePiece, piece_writer
from qinfer.server.errors import failure_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"  # a comment: clients skip it


def event(json: str) -> str:
    """One server-sent event."""
    return f"data: {json}\n\n"


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the source, item) as items arrive; the first failure, or closing this, closes all sources."""
    waiting = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[index]))] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; when the client leaves first, cancels it and raises ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A `text/event-stream` of `events`, which is closed in any case: at the end, on failure, on leaving.

    Where `keep_alive` seconds pass without an event, a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], *, keep_alive: float | None = None) -> None:
        self.events, self.keep_alive = events, keep_alive
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, piece_writer(scope)))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self.events.aclose()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send, write: WritePiece) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self.events if self.keep_alive is None else self._kept_alive(self.keep_alive):
            if not write(data := text.encode()):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _kept_alive(self, seconds: float) -> AsyncGenerator[str, None]:
        coming = asyncio.ensure_future(anext(self.events, None))
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=seconds)
                if not done:
                    yield KEEP_ALIVE
                    continue
                if (text := coming.result()) is None:
                    return
                yield text
                coming = asyncio.ensure_future(anext(self.events, None))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def ended_in_order(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The first event, the others, then `[DONE]`; a failure becomes one error event before it."""
    try:
        yield first
        async for text in events:
            yield text
    except Exception as error:  # the status line is sent: this is the only place left to say it
        if not isinstance(error, QinferError):
            logger.exception("a stream failed")
        yield event(failure_of(error).json())
    finally:
        await events.aclose()
    yield DONE
