"""POST /v1/completions: text or tokens in, text out; several prompts, n, echo, logprobs, streams.

Choice number `prompt * n + k` is the k-th answer to a prompt. `echo` puts the prompt before the answer; with
logprobs it is what the prompt's tokens spell, so that the offsets are those of the text, and with
`max_tokens` 0 it scores the prompt alone: the engine makes one token, which is dropped and not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from qinfer.detokenizer import Detokenizer
from qinfer.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from qinfer.server.answer import ChunkedAnswer, Work, encoded, truncated
from qinfer.server.deltas import Delta, Progress
from qinfer.server.errors import ApiError
from qinfer.server.forms import compile_form
from qinfer.server.logprobs import CompletionLogprobWriter, prompt_logprobs
from qinfer.server.protocol import CompletionRequest
from qinfer.server.sampling import check_room, completion_params
from qinfer.server.state import ServerState
from qinfer.server.wire import Body, Completion, CompletionChoice, CompletionLogprobs, Usage


async def answer(state: ServerState, request: CompletionRequest, request_id: str) -> Response:
    """Answers the request; raises UserError, ApiError or NotImplementedError for what cannot be done."""
    state.admit(request)
    work = await asyncio.to_thread(_work, state, request)  # a long prompt must not hold up every stream
    return await CompletionAnswer(state, request, f"cmpl-{request.request_id or request_id}", work).respond()


def _work(state: ServerState, request: CompletionRequest) -> list[Work]:
    prompts = request.prompts()
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt is empty: give at least one character or token", "prompt")
    return [_one(state, request, prompt) for prompt in prompts]


def _one(state: ServerState, request: CompletionRequest, prompt: str | list[int]) -> Work:
    engine = state.engine
    text = prompt if isinstance(prompt, str) else None
    token_ids = _tokens(state, request, prompt)
    kept = truncated(token_ids, request.truncate_prompt_tokens, engine.max_model_len)
    if not kept:
        raise ApiError(400, "no token of the prompt is left", "truncate_prompt_tokens")
    room = check_room(len(kept), engine.max_model_len)
    params = completion_params(request, engine.default_sampling_params, room=room)
    compile_form(state, request, params)
    return Work(kept, text if len(kept) == len(token_ids) else None, params)


def _tokens(state: ServerState, request: CompletionRequest, prompt: str | list[int]) -> list[int]:
    keep, special = request.truncate_prompt_tokens, request.add_special_tokens is not False
    marks = state.infill_marks if request.suffix else None
    if marks is None:
        return encoded(state, prompt, keep, add_special_tokens=special) if isinstance(prompt, str) else prompt
    before = prompt if isinstance(prompt, list) else encoded(state, prompt, keep, add_special_tokens=False)
    after = encoded(state, request.suffix or "", keep, add_special_tokens=False)
    start = state.engine.tokenizer.encode("") if special and isinstance(prompt, str) else []
    return [*start, *marks.around(before, after)]


class CompletionAnswer(ChunkedAnswer):
    """A completion as it grows."""

    request: CompletionRequest

    def __init__(
        self, state: ServerState, request: CompletionRequest, answer_id: str, work: Sequence[Work]
    ) -> None:
        super().__init__(state, request, answer_id, work)
        self.generated = request.max_tokens != 0
        self._writers: dict[int, CompletionLogprobWriter] = {}

    def chunks(self, index: int, output: RequestOutput, completion: CompletionOutput) -> list[Body]:
        """One where there is something new to show."""
        choice = self._choice(index, output, completion)
        return [] if choice is None else [self._completion([choice], self.usage_field())]

    @property
    def is_plain(self) -> bool:
        """Without logprobs, ids and counts."""
        asked = self.request
        says_more = asked.return_token_ids or asked.logprobs is not None or self.usage_field()
        return self.generated and not says_more

    def text_chunk(self, index: int, text: str) -> Body:
        """A choice that has not finished."""
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None, stop_reason=None)
        return self._completion([choice], {})

    def usage_chunk(self, usage: Usage) -> Body:
        """Token counts and no choice."""
        return self._completion([], {"usage": usage})

    def body(self) -> Body:
        """All choices, in order."""
        choices = [
            self._choice(prompt * len(output.outputs) + completion.index, output, completion)
            for prompt, output in enumerate(self.latest)
            if output is not None
            for completion in output.outputs
        ]
        fingerprint = {"system_fingerprint": self.state.fingerprint}
        return self._completion([c for c in choices if c is not None], {**fingerprint, "usage": self.usage()})

    def _completion(self, choices: list[CompletionChoice], more: Mapping[str, Any]) -> Completion:
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            **more,
        )

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice | None:
        first = index not in self.progress
        progress = self.progress.setdefault(index, Progress(self.request.stream_interval or 1))
        if not self.generated:
            completion = _without_tokens(completion)
        delta = progress.take(completion)
        if delta is None:
            if first:
                del self.progress[index]  # nothing was said yet: the echo is still to come
            return None
        logprobs = self._logprobs(index, output, delta, first)
        more = self._extensions(output, delta, first)
        text = self._echo(output) + delta.text if first and self.request.echo else delta.text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            **more,
        )

    def _logprobs(
        self, index: int, output: RequestOutput, delta: Delta, first: bool
    ) -> CompletionLogprobs | None:
        if self.request.logprobs is None or delta.logprobs is None:
            return None
        if first:
            self._writers[index] = self._writer(output)
        writer = self._writers[index]
        writer.add(delta.token_ids, delta.logprobs)
        return writer.take()

    def _writer(self, output: RequestOutput) -> CompletionLogprobWriter:
        echo = self.request.echo
        writer = CompletionLogprobWriter(
            self.state.engine.tokenizer,
            [] if echo else output.prompt_token_ids,
            skip_special_tokens=self.request.skip_special_tokens is not False,
            as_ids=self.request.return_tokens_as_token_ids,
        )
        if echo:
            assert output.prompt_logprobs is not None, "asked for with echo and logprobs"
            writer.add(output.prompt_token_ids, output.prompt_logprobs)
        return writer

    def _echo(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.request.logprobs is None:
            return output.prompt
        skip = self.request.skip_special_tokens is not False
        # not `decode`: half a character at the end belongs to the answer, which completes it
        text = Detokenizer(self.state.engine.tokenizer, [], skip_special_tokens=skip)
        return text.push(output.prompt_token_ids)

    def _extensions(self, output: RequestOutput, delta: Delta, first: bool) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.request.return_token_ids:
            more["token_ids"] = list(delta.token_ids)
            if first:
                more["prompt_token_ids"] = output.prompt_token_ids
        if first and self.request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return more


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """The completion as if no token had been asked for."""
    logprobs: SampleLogprobs | None = None if completion.logprobs is None else []
    return replace(
        completion, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None
    )
