"""Where a request's outputs, and answers to questions, wait for whoever asked.

Outputs are cumulative, so that a mailbox holds the latest only: a slow reader loses nothing and no queue can
grow. The engine's thread hands over; what is handed over arrives on the reader's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from qinfer.errors import UserError
from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qinfer.engine.engine import Engine
    from qinfer.engine.pooling import Pooling

T = TypeVar("T")
X = TypeVar("X")


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


class Answer(Generic[T]):
    """What a question to the engine found, awaited by its asker as `future`."""

    def __init__(self) -> None:
        self.future = asyncio.Future[T]()
        self._loop = asyncio.get_running_loop()

    def find(self, question: Callable[[], T]) -> None:
        """Asks, on the engine's thread, and sends the answer; only the asker's own mistake goes to him."""
        try:
            found = question()
        except UserError as mistake:
            self._send(self.future.set_exception, mistake)
        else:
            self._send(self.future.set_result, found)

    def _send(self, settle: Callable[[X], None], content: X) -> None:
        def arrive() -> None:
            if not self.future.done():  # cancelled meanwhile
                settle(content)

        with contextlib.suppress(RuntimeError):  # that loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(arrive)


@dataclass
class LiveRequest:
    """A request on its way to the engine, or in it."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    mailbox: Mailbox
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    pooling: Pooling | None = None
    whole: bool = False  # the reader wants the last output only
    arrival: float = field(default_factory=time.monotonic)
    arrival_time: float = field(default_factory=time.time)
    latest: RequestOutput | None = None

    def enter(self, engine: Engine) -> None:
        """Becomes one of the engine's; raises as `Engine.add`."""
        engine.add(
            self.request_id,
            self.token_ids,
            self.params,
            prompt=self.prompt,
            priority=self.priority,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
            pooling=self.pooling,
        )

    def aborted(self) -> RequestOutput:
        """What a reader gets in place of the rest."""
        latest = self.latest or RequestOutput(self.request_id, self.prompt, self.token_ids, None, [], False)
        outputs = [
            replace(choice, finish_reason=choice.finish_reason or "abort") for choice in latest.outputs
        ]
        return replace(latest, outputs=outputs, finished=True)


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


def put_all(letters: Sequence[tuple[Mailbox, RequestOutput | Exception]]) -> None:
    """Fills the mailboxes of one loop, on its thread."""
    for mailbox, content in letters:
        mailbox.put(content)
