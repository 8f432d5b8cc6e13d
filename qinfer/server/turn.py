"""What one choice of a chat has said and called so far, piece by piece.

A choice's text goes through a reader of calls where the client brought tools. Streamed, each part becomes a
delta; whole, the same deltas are put together: one way to read, so both say the same. Tokens that brought
nothing to show yet wait, with their logprobs, for the next chunk that does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from qinfer.server.call_readers import CallReader, Part
from qinfer.server.deltas import Delta
from qinfer.server.wire import CalledFunction, ChatMessage, ToolCall


class Turn:
    """One choice; `reader` None: all text is content. Without `parallel` only the first call counts.

    `ends_by_calls`: whether calls are told as the finish reason.
    """

    def __init__(self, reader: CallReader | None, *, parallel: bool, ends_by_calls: bool) -> None:
        self._reader = reader
        self._parallel = parallel
        self._ends_by_calls = ends_by_calls
        self._num_calls = 0
        self._waiting: Delta | None = None

    @property
    def is_text(self) -> bool:
        """Whether all that is said is content."""
        return self._reader is None

    def take(self, delta: Delta) -> list[tuple[ChatMessage, Delta]]:
        """(what to say, the tokens that go with it), the finish reason in the last."""
        delta = _joined(self._waiting, delta)
        self._waiting = None
        if self._reader is None:
            said = ChatMessage(content=delta.text) if delta.text else ChatMessage()
            return [(said, delta)]
        ends = delta.finish_reason is not None
        parts = self._reader.feed(delta.text) + (self._reader.finish() if ends else [])
        messages = [self._message(part) for part in parts if self._counts(part)]
        if ends:
            messages.append(ChatMessage())
        if not messages:
            self._waiting = delta
            return []
        open_end = delta._replace(finish_reason=None, stop_reason=None)
        silent = open_end._replace(token_ids=[], logprobs=None if delta.logprobs is None else [])
        chunks = [(message, silent) for message in messages]
        chunks[0] = messages[0], open_end
        if ends:
            last, reason = chunks[-1][1], self._reason(delta)
            chunks[-1] = messages[-1], last._replace(finish_reason=reason, stop_reason=delta.stop_reason)
        return chunks

    def _reason(self, delta: Delta) -> str | None:
        calls = self._num_calls and self._ends_by_calls and delta.finish_reason == "stop"
        return "tool_calls" if calls else delta.finish_reason

    def _counts(self, part: Part) -> bool:
        return isinstance(part, str) or self._parallel or part.index == 0

    def _message(self, part: Part) -> ChatMessage:
        if isinstance(part, str):
            return ChatMessage(content=part)
        if part.name is None:
            function = CalledFunction(arguments=part.arguments)
            return ChatMessage(tool_calls=[ToolCall(index=part.index, function=function)])
        self._num_calls += 1
        function = CalledFunction(name=part.name, arguments="")
        call = ToolCall(index=part.index, id=new_call_id(), type="function", function=function)
        return ChatMessage(tool_calls=[call])


def new_call_id() -> str:
    """An id that no other call has."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def whole(role: str, messages: Iterable[ChatMessage], *, before: str = "") -> ChatMessage:
    """The deltas of a choice as one message; `before` stands before its content."""
    content = before
    calls: list[ToolCall] = []
    for message in messages:
        content += message.content or ""
        for call in message.tool_calls or ():
            if call.id is not None:
                function = CalledFunction(name=call.function.name, arguments="")
                calls.append(ToolCall(id=call.id, type="function", function=function))
            else:
                calls[-1].function.arguments += call.function.arguments
    if not calls:
        return ChatMessage(role=role, content=content, refusal=None)
    return ChatMessage(role=role, content=content or None, refusal=None, tool_calls=calls)


def _joined(before: Delta | None, delta: Delta) -> Delta:
    """Tokens that waited, and the new ones; the waiting text has been read."""
    if before is None:
        return delta
    logprobs = None if delta.logprobs is None else [*(before.logprobs or ()), *delta.logprobs]
    return delta._replace(token_ids=[*before.token_ids, *delta.token_ids], logprobs=logprobs)
