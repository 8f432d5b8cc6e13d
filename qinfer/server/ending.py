"""How a server ends: by a signal, with or without patience for what is under way; or with its engine.

The first SIGTERM or SIGINT shuts the door: /health and new requests get 503 while the others are answered,
until all are or the operator's patience is over; what is left then ends with an error. The second signal
leaves at once. A dead engine still says so for a moment, then the process ends with 1, for a supervisor to
start another. Whatever hangs on the way, a step or a thread, is left behind after LAST seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import sys
import threading

import uvicorn

from qinfer.async_llm import AsyncLLM
from qinfer.server.door import Door

logger = logging.getLogger(__name__)

GRACE = 3.0  # seconds for answers to end, and again for the step that the engine is in
LAST = 2 * GRACE + 1
DEATH_SHOWS = 0.5  # seconds in which a dead engine is seen in /health and answers
DEATH_LAST = 4.0


class Ending:
    """Ends `server` and what is behind it; `timeout` is the patience in seconds with requests under way."""

    def __init__(self, server: uvicorn.Server, engine: AsyncLLM, door: Door, timeout: float) -> None:
        self.server, self.engine, self.door, self.timeout = server, engine, door, timeout
        self._drain: asyncio.Task[None] | None = None
        self._last_resort: threading.Timer | None = None

    def on_signal(self) -> None:
        """Drains; the second time it is meant: leaves."""
        if self._drain is not None:
            leave(int(self.engine.errored))
        self._drain = asyncio.ensure_future(self._end())

    async def watch(self) -> None:
        """Returns when the engine has died and the server is to close."""
        while not self.engine.errored:
            await asyncio.sleep(0.1)
        self._set_last_resort(DEATH_LAST, 1)
        await asyncio.sleep(DEATH_SHOWS)
        self.server.should_exit = True

    def cancel(self) -> None:
        """All has ended in order."""
        if self._last_resort is not None:
            self._last_resort.cancel()

    async def _end(self) -> None:
        self.door.shut()
        logger.info("shutting down; %d requests have %g s to end", self.door.num_inside, self.timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                await self.door.wait_until_empty()
                await self.engine.wait_for_requests_to_drain(self.timeout)
        self._set_last_resort(LAST, 0)
        self.engine.shutdown(timeout=0)  # ends all requests; the thread is joined when the server has closed
        self.server.should_exit = True

    def _set_last_resort(self, seconds: float, code: int) -> None:
        if self._last_resort is None:
            self._last_resort = threading.Timer(seconds, _leave_what_hangs, [seconds, code])
            self._last_resort.daemon = True
            self._last_resort.start()


def _leave_what_hangs(seconds: float, code: int) -> None:
    logger.warning("something has not ended in %g s: leaving without it", seconds)
    leave(code)


def leave(code: int) -> None:
    """Ends the process and its children without waiting for anything."""
    try:
        for child in multiprocessing.active_children():
            child.kill()  # one that was stopped would not see the pipe's end
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(code)  # not sys.exit: the interpreter would take the engine's thread apart in mid-step
