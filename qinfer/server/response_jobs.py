"""Responses in the background: made whether or not anybody listens, asked for later, cancelled by id.

A job runs the answer's events to their end on the server's loop and keeps them, so that any number of readers
may follow from any event on, and one whose connection broke goes on where it was. With the last event the
response moves into the store as every other; one that was cancelled, or whose engine failed, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from qinfer.errors import QinferError
from qinfer.server.errors import failure_of
from qinfer.server.response_answer import ResponseAnswer
from qinfer.server.response_store import ResponseStore

logger = logging.getLogger(__name__)


class Job:
    """One response under way; `events` are all until now, as they are sent."""

    def __init__(self, answer: ResponseAnswer, store: ResponseStore) -> None:
        self.answer, self._store = answer, store
        self.events: list[str] = []
        self._is_done = False
        self._news = asyncio.Event()
        store.jobs[answer.id] = self
        self._task = asyncio.create_task(self._run())

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        return self.answer.body()

    async def cancel(self) -> None:
        """Ends the job; what it has said until now is kept."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def follow(self, start: int = 0) -> AsyncGenerator[str, None]:
        """The events from number `start` on, as they come."""
        while start < len(self.events) or not self._is_done:
            if start < len(self.events):
                yield self.events[start]
                start += 1
            else:
                await self._news.wait()

    async def _run(self) -> None:
        try:
            async with aclosing(self.answer.steps()) as steps:
                async for events in steps:
                    self._say(events)
        except asyncio.CancelledError:
            self._say(self.answer.cancelled())
        except Exception as error:  # there is no request that could still be answered with a status
            if not isinstance(error, QinferError):
                logger.exception("a response in the background failed")
            self._say(self.answer.failed(failure_of(error)))
        finally:
            del self._store.jobs[self.answer.id]
            self.answer.keep(self.events if self.answer.request.stream else ())
            self._is_done = True
            self._news.set()

    def _say(self, events: list[str]) -> None:
        self.events += events
        self._news.set()
        self._news = asyncio.Event()
