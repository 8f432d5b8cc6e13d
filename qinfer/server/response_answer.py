"""A response as it grows: from the engine's outputs to items, events and the document that they end in.

Every event carries a number. `response.created` comes with the engine's first output, so that what fails
before it is an HTTP error; of a response in the background it comes at once, since that request is answered
before anything is computed.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from qinfer.errors import QinferError
from qinfer.outputs import CompletionOutput
from qinfer.server.answer import Answer, Work
from qinfer.server.chat import turn_of
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.deltas import Delta, Progress
from qinfer.server.errors import Failure, failure_of
from qinfer.server.logprobs import chat_logprobs
from qinfer.server.response_input import ChatMessages
from qinfer.server.response_items import Event, Items
from qinfer.server.response_store import ResponseStore
from qinfer.server.responses_protocol import ResponsesRequest
from qinfer.server.state import ServerState

logger = logging.getLogger(__name__)

_STATUS = {"length": "incomplete", "error": "failed", "abort": "failed"}  # of finish reasons; else completed
_RUNNING = ("queued", "in_progress")


class ResponseAnswer(Answer):
    """One response; `messages` are the conversation up to here."""

    def __init__(
        self,
        state: ServerState,
        store: ResponseStore,
        asked: ResponsesRequest,
        chat: ChatRequest,
        messages: ChatMessages,
        work: Work,
    ) -> None:
        super().__init__(state, chat, f"resp_{uuid.uuid4().hex}", [work])
        self._store, self._asked, self._messages = store, asked, messages
        self._turn = turn_of(state, chat)
        self._progress = Progress(chat.stream_interval or 1)
        self._items = Items()
        self._status = "queued" if asked.background else "in_progress"
        self._error: dict[str, str] | None = None
        self._num_events = 0

    @property
    def whole(self) -> bool:
        """Of a response in the background its client may ask at any moment."""
        return super().whole and not self._asked.background

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._status not in _RUNNING

    async def steps(self) -> AsyncGenerator[list[str], None]:
        """All events, from `response.created` to the last, in groups as they come."""
        first: tuple[str, ...] = ("created", "in_progress")
        if self._asked.background:
            yield [self._written(self._of("created")), self._written(self._of("queued"))]
            first = ("in_progress",)
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                if first:
                    self._status = "in_progress"
                events = [self._of(kind) for kind in first]
                first = ()
                events += self._advance(output.outputs[0])
                if self.is_over:
                    events.append(self._of(self._status))
                if events:
                    yield [self._written(event) for event in events]

    async def events(self) -> AsyncGenerator[str, None]:
        """The same for a client that listens; the response is kept with the last."""
        async with aclosing(self.steps()) as steps:
            async for events in steps:
                if self.is_over:
                    self.keep()
                yield "".join(events)

    def ended(self, first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The events; a failure becomes one `error`, the last."""
        return self._ended(first, events)

    async def _ended(self, first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        try:
            yield first
            async for text in events:
                yield text
        except Exception as error:  # the status line is sent: this is the only place left to say it
            if not isinstance(error, QinferError):
                logger.exception("a stream failed")
            failure = failure_of(error)
            yield self._written(_error_event(str(failure.status), failure.message, failure.param))
        finally:
            await events.aclose()

    def text(self) -> str:
        """The finished response."""
        (output,) = self.latest
        assert output is not None, "the request has finished"
        self._advance(output.outputs[0])
        self.keep()
        return json.dumps(self.body())

    def keep(self, events: Sequence[str] = ()) -> None:
        """Stores the finished response where it may be kept."""
        if self._asked.store is not False:
            self._store.put(self.body(), [*self._messages, self._items.turn()], events)

    def failed(self, failure: Failure) -> list[str]:
        """Ends the response with an error; returns the event that says so."""
        self._items.close("incomplete")
        self._status, self._error = "failed", {"code": "server_error", "message": failure.message}
        return [self._written(self._of("failed"))]

    def cancelled(self) -> list[str]:
        """Ends the response as its client wished; returns the event that says so."""
        self._items.close("incomplete")
        self._status = "cancelled"
        return [self._written(_error_event("cancelled", "the response was cancelled", None))]

    def _advance(self, completion: CompletionOutput) -> list[Event]:
        """Events of what the choice has got since."""
        delta = self._progress.take(completion)
        if delta is None:
            return []
        events: list[Event] = []
        for message, part in self._turn.take(delta):
            if message.content:
                events += self._items.say(message.content, self._logprobs(part))
            for call in message.tool_calls or ():
                if call.id is not None:
                    events += self._items.call(str(call.function.name))
                else:
                    events += self._items.argue(call.function.arguments)
        if delta.finish_reason is not None:
            self._status = _STATUS.get(delta.finish_reason, "completed")
            if self._status == "failed":
                said = f"the answer ended with {delta.finish_reason!r}"
                self._error = {"code": "server_error", "message": said}
            events += self._items.finish("completed" if self._status == "completed" else "incomplete")
        return events

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.logprobs is None:
            return []
        tokenizer, num_top = self.state.engine.tokenizer, self._asked.top_logprobs or 0
        found = chat_logprobs(tokenizer, delta.token_ids, delta.logprobs, num_top=num_top, as_ids=False)
        return [entry.model_dump() for entry in found.content]

    def _written(self, event: Event) -> str:
        numbered = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {event['type']}\ndata: {json.dumps(numbered)}\n\n"

    def _of(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self.body()}

    def body(self) -> dict[str, Any]:
        """The response's document as it is now."""
        status, params = self._status, self.work[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": bool(self._asked.background),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": self._items.output if self.is_over else [],
            "service_tier": None,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": self._usage() if self.is_over else None,
            **self._asked.echoed(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }


def _error_event(code: str, message: str, param: str | None) -> Event:
    return {"type": "error", "code": code, "message": message, "param": param}
