"""Where a request's outputs wait for its reader.

Outputs are cumulative, so that a mailbox holds the latest only: a slow reader loses nothing and no queue can
grow. Whoever hears from the engine hands over; what is handed over arrives on the reader's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from qinfer.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)


class Mailbox:
    """The latest output of one request, read on `loop`; everything here runs on that loop's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._content: RequestOutput | Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for content; there is one reader

    def put(self, content: RequestOutput | Exception) -> None:
        """Replaces what is in it."""
        self._content = content
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> RequestOutput:
        """Waits for the next content; raises it where it is an error."""
        if self._content is None:
            self._reader = self.loop.create_future()
            await self._reader
        content, self._content = self._content, None
        if isinstance(content, Exception):
            raise content
        assert content is not None
        return content


Letter = tuple[Mailbox, RequestOutput | Exception]


def deliver(mail: Iterable[Letter]) -> None:
    """Fills mailboxes from any thread, waking each event loop once."""
    by_loop = defaultdict(list)
    for letter in mail:
        by_loop[letter[0].loop].append(letter)
    for loop, letters in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, letters)
        except RuntimeError:  # that loop was closed with requests in flight: nobody waits there any more
            logger.debug("an event loop was closed before its %d answers came", len(letters))


def _put_all(letters: Sequence[Letter]) -> None:
    for mailbox, content in letters:
        mailbox.put(content)


def since(output: RequestOutput, seen: dict[int, CompletionOutput]) -> RequestOutput:
    """What `output` adds to the choices in `seen`, which are brought up to date."""
    choices = []
    for choice in output.outputs:
        before = seen.get(choice.index)
        seen[choice.index] = choice
        if before is not None:
            start = len(before.token_ids)
            choice = replace(
                choice,
                text=choice.text[len(before.text) :],
                token_ids=choice.token_ids[start:],
                logprobs=None if choice.logprobs is None else choice.logprobs[start:],
            )
        choices.append(choice)
    return replace(output, outputs=choices)
