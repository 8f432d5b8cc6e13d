"""POST /v1/chat/completions: a conversation in, the next turn out.

The model's own chat template turns the messages into tokens. A stream says the role first, once per choice
and only when the engine's first output is there; then text, then the finish reason with the last text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.server.answer import ChunkedAnswer, Work
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.conversation import prompt_of
from qinfer.server.deltas import Delta, Progress
from qinfer.server.forms import compile_form
from qinfer.server.logprobs import chat_logprobs, prompt_logprobs
from qinfer.server.sampling import chat_params, check_room
from qinfer.server.state import ServerState
from qinfer.server.tools import NamedChoice, reader_of, text_or_calls
from qinfer.server.turn import Turn, whole
from qinfer.server.wire import Body, Chat, ChatChoice, ChatLogprobs, ChatMessage, Usage

ROLE = "assistant"


async def answer(state: ServerState, request: ChatRequest, request_id: str) -> Response:
    """Answers the request; raises UserError, ApiError or NotImplementedError for what cannot be done."""
    state.admit(request)
    work = await asyncio.to_thread(work_of, state, request)  # a long prompt must not hold up every stream
    return await ChatAnswer(state, request, f"chatcmpl-{request.request_id or request_id}", [work]).respond()


def work_of(state: ServerState, request: ChatRequest) -> Work:
    """What the engine is to do; raises UserError or ApiError for what cannot be done."""
    engine = state.engine
    special = request.add_special_tokens is True
    token_ids = prompt_of(state, request, keep=request.truncate_prompt_tokens, add_special_tokens=special)
    room = check_room(len(token_ids), engine.max_model_len)
    params = chat_params(request, engine.default_sampling_params, room=room)
    if request.choice == "auto":
        params.skip_special_tokens &= not state.hides_calls
        if params.structured_outputs is not None:
            tools, form = request.tools or (), params.structured_outputs
            params.structured_outputs = text_or_calls(tools, form, state.tool_parser)
    compile_form(state, request, params)
    return Work(token_ids, None, params)


def turn_of(state: ServerState, request: ChatRequest) -> Turn:
    """Reads one choice; ApiError where nobody knows how this model calls tools."""
    reader = reader_of(request.tools or (), request.choice, state.tool_parser)
    named = isinstance(request.choice, NamedChoice)
    return Turn(reader, parallel=request.parallel, ends_by_calls=not named)


class ChatAnswer(ChunkedAnswer):
    """A chat completion as it grows."""

    request: ChatRequest

    def __init__(
        self, state: ServerState, request: ChatRequest, answer_id: str, work: Sequence[Work]
    ) -> None:
        super().__init__(state, request, answer_id, work)
        self._turns = [turn_of(state, request) for _ in range(request.n or 1)]
        self._num_finished = 0

    def chunks(self, index: int, output: RequestOutput, completion: CompletionOutput) -> list[Body]:
        """The role of a choice that is new, then what it says."""
        chunks = [] if index in self.progress else [self._role_chunk(index, output)]
        if (delta := self._take(completion)) is not None:
            chunks += [self._chunk(index, *one) for one in self._turns[index].take(delta)]
        return chunks

    @property
    def is_plain(self) -> bool:
        """Without tools, logprobs, ids and counts."""
        asked = self.request
        says_more = asked.return_token_ids or asked.logprobs or self.usage_field()
        return self._turns[0].is_text and not says_more

    def text_chunk(self, index: int, text: str) -> Body:
        """A choice that has not finished."""
        delta = Delta(text, [], None, None, None)
        return self._chunk(index, ChatMessage(content=text), delta)

    def usage_chunk(self, usage: Usage) -> Body:
        """Token counts and no choice."""
        return self._chat("chat.completion.chunk", [], {"usage": usage})

    def body(self) -> Body:
        """All choices, in order."""
        output = self.latest[0]
        assert output is not None, "the request has finished"
        choices = []
        for completion in output.outputs:
            delta = self._take(completion)
            assert delta is not None, "nothing was taken before"
            said = self._turns[completion.index].take(delta)
            message = whole(ROLE, [message for message, _ in said], before=self._echo())
            delta = delta._replace(finish_reason=said[-1][1].finish_reason)
            choices.append(self._choice(completion.index, delta, {"message": message}))
        more: dict[str, Any] = {"system_fingerprint": self.state.fingerprint, "usage": self.usage()}
        if self.request.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        if self.request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return self._chat("chat.completion", choices, more)

    def _take(self, completion: CompletionOutput) -> Delta | None:
        interval = self.request.stream_interval or 1
        return self.progress.setdefault(completion.index, Progress(interval)).take(completion)

    def _role_chunk(self, index: int, output: RequestOutput) -> Body:
        delta = ChatMessage(role=ROLE, content=self._echo())
        choice = ChatChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        more: dict[str, Any] = self.usage_field()
        if self.request.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        return self._chat("chat.completion.chunk", [choice], more)

    def _chunk(self, index: int, said: ChatMessage, delta: Delta) -> Body:
        more: dict[str, Any] = self.usage_field()
        if delta.finish_reason is not None:
            self._num_finished += 1
            if self._num_finished == len(self._turns):
                more["system_fingerprint"] = self.state.fingerprint
        return self._chat("chat.completion.chunk", [self._choice(index, delta, {"delta": said})], more)

    def _choice(self, index: int, delta: Delta, said: Mapping[str, ChatMessage]) -> ChatChoice:
        more: dict[str, Any] = dict(said)
        if delta.finish_reason is not None:
            more["stop_reason"] = delta.stop_reason
        if self.request.return_token_ids:
            more["token_ids"] = list(delta.token_ids)
        logprobs = self._logprobs(delta)
        return ChatChoice(index=index, logprobs=logprobs, finish_reason=delta.finish_reason, **more)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(
            self.state.engine.tokenizer,
            delta.token_ids,
            delta.logprobs,
            num_top=self.request.top_logprobs or 0,
            as_ids=self.request.return_tokens_as_token_ids,
        )

    def _chat(self, kind: Any, choices: list[ChatChoice], more: Mapping[str, Any]) -> Chat:
        return Chat(id=self.id, object=kind, created=self.created, model=self.model, choices=choices, **more)

    def _echo(self) -> str:
        """With `echo`, the text of a last message of the assistant's, which the answer goes on from."""
        last = self.request.messages[-1]
        if not self.request.echo or last.role != ROLE:
            return ""
        return str(last.for_template()["content"])
