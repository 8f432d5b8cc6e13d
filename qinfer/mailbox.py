"""Where a request's outputs wait for its reader.

Whoever hears from the engine hands parts over; they arrive on the reader's event loop, where they are joined.
The reader takes all that has come as one output: a slow one loses nothing, and takes fewer and longer ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qinfer.output_parts import Joiner, Part
from qinfer.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from qinfer.live_request import Ask

logger = logging.getLogger(__name__)

Content = Part | Exception | None  # None: no more comes, since somebody has aborted the request


class Mailbox:
    """The outputs of one request, read on `loop`; everything here runs on that loop's thread.

    Of a `whole` one the reader gets nothing before the last.
    """

    def __init__(self, ask: Ask, *, whole: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self._joiner, self._whole = Joiner(ask), whole
        self._error: Exception | None = None
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # waits for news; there is one reader

    def put(self, content: Content) -> None:
        """Takes what has come, and wakes the reader."""
        if isinstance(content, Exception):
            self._error = content
        elif content is None:
            self._joiner.abort()
        elif not self._joiner.add(content) and self._whole:
            return
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> RequestOutput:
        """Waits for news and returns all that has come; raises it where it is an error."""
        if not self._has_news:
            self._reader = self.loop.create_future()
            await self._reader
        self._has_news = False
        if self._error is not None:
            raise self._error
        return self._joiner.output()


Letter = tuple[Mailbox, Content]


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
