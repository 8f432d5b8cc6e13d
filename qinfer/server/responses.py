"""/v1/responses: a conversation as items in, items out; streamed as named events without a `[DONE]`.

A response is a chat (`responses_protocol` says how) whose one choice is told as items (`response_items`).
Every event carries a number; `response.created` comes with the engine's first output, so that what fails
before it is an HTTP error. Finished responses are kept for a while unless the client says `store: false`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from qinfer.errors import QinferError
from qinfer.outputs import CompletionOutput
from qinfer.server.answer import Answer, Work
from qinfer.server.chat import turn_of, work_of
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.deltas import Delta, Progress
from qinfer.server.errors import failure_of
from qinfer.server.logprobs import chat_logprobs
from qinfer.server.response_input import ChatMessages
from qinfer.server.response_items import Event, Items
from qinfer.server.response_store import ResponseStore
from qinfer.server.responses_protocol import ResponsesRequest
from qinfer.server.state import ServerState

logger = logging.getLogger(__name__)

_STATUS = {"length": "incomplete", "error": "failed", "abort": "failed"}  # of finish reasons; else completed


async def answer(state: ServerState, store: ResponseStore, request: ResponsesRequest) -> Response:
    """Answers the request; raises UserError, ApiError or NotImplementedError for what cannot be done."""
    request.refuse_absent()
    before = request.previous_response_id
    history = store.get(before, "previous_response_id").messages if before is not None else []
    chat = request.chat(history)
    state.admit(chat)
    work = await asyncio.to_thread(work_of, state, chat)
    messages = [*history, *request.messages()]
    return await ResponseAnswer(state, store, request, chat, messages, work).respond()


class ResponseAnswer(Answer):
    """A response as it grows; `messages` are the conversation up to here."""

    def __init__(
        self,
        state: ServerState,
        store: ResponseStore,
        request: ResponsesRequest,
        chat: ChatRequest,
        messages: ChatMessages,
        work: Work,
    ) -> None:
        super().__init__(state, chat, f"resp_{uuid.uuid4().hex}", [work])
        self._store, self._asked, self._messages = store, request, messages
        self._turn = turn_of(state, chat)
        self._progress = Progress(chat.stream_interval or 1)
        self._items = Items()
        self._reason: str | None = None
        self._num_events = 0

    async def events(self) -> AsyncGenerator[str, None]:
        """All events, from `response.created` to the last."""
        begun = False
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                events = [] if begun else [self._of("created"), self._of("in_progress")]
                begun = True
                events += self._advance(output.outputs[0])
                if events:
                    yield "".join(map(self._written, events))
        yield self._written(self._of(self._end()))

    async def _ended(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        try:
            async for text in events:
                yield text
        except Exception as error:  # the status line is sent: this is the only place left to say it
            if not isinstance(error, QinferError):
                logger.exception("a stream failed")
            failure = failure_of(error)
            said = {"code": str(failure.status), "message": failure.message, "param": failure.param}
            yield self._written({"type": "error", **said})
        finally:
            await events.aclose()

    def ended(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The events; a failure becomes one `error`, the last."""
        return self._ended(events)

    def text(self) -> str:
        """The finished response."""
        (output,) = self.latest
        assert output is not None, "the request has finished"
        self._advance(output.outputs[0])
        self._end()
        return json.dumps(self._body(self._status()))

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
            self._reason = delta.finish_reason
            events += self._items.finish("completed" if self._status() == "completed" else "incomplete")
        return events

    def _status(self) -> str:
        return "in_progress" if self._reason is None else _STATUS.get(self._reason, "completed")

    def _end(self) -> str:
        """Keeps the finished response where it may be kept; returns its status."""
        status = self._status()
        if self._asked.store is not False:
            self._store.put(self._body(status), [*self._messages, self._items.turn()])
        return status

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
        status = "in_progress" if kind in ("created", "in_progress") else kind
        return {"type": f"response.{kind}", "response": self._body(status)}

    def _body(self, status: str) -> dict[str, Any]:
        failed = {"code": "server_error", "message": f"the answer ended with {self._reason!r}"}
        is_running, params = status == "in_progress", self.work[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": failed if status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [] if is_running else self._items.output,
            "service_tier": None,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None if is_running else self._usage(),
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
