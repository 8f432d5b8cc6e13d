"""What all answers that are generated are made of: requests to the engine, events, token counts.

A route makes an `Answer` once the prompts are tokens. Streamed or not, the engine's outputs run through
`outputs`; streamed, `events` says what each adds; whole, `text` reads the last ones. Completions and chat
stream in chunks of one form: a `ChunkedAnswer`.
"""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from starlette.responses import Response

from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.server import beams
from qinfer.server.deltas import Progress, usage_of
from qinfer.server.protocol import GenerationRequest
from qinfer.server.sampling import check_room
from qinfer.server.state import ServerState
from qinfer.server.streaming import EventStream, ended_in_order, event, merge
from qinfer.server.text_events import TextEvents
from qinfer.server.wire import Body, Usage

logger = logging.getLogger(__name__)

MAX_LOGGED = 1000  # characters of a prompt


class Work(NamedTuple):
    """One request to the engine: the prompt as tokens, its text where the client sent one, the parameters."""

    token_ids: list[int]
    text: str | None
    params: SamplingParams


class Answer(ABC):
    """One HTTP answer as it grows; `latest[i]` is the newest output of prompt i."""

    generated = True  # False: the one generated token is dropped and not counted

    def __init__(
        self, state: ServerState, request: GenerationRequest, answer_id: str, work: Sequence[Work]
    ) -> None:
        self.state, self.request, self.id, self.work = state, request, answer_id, work
        self.created = int(time.time())
        self.model = state.model_names[0]
        self.latest: list[RequestOutput | None] = [None] * len(work)

    @property
    def whole(self) -> bool:
        """Whether nobody hears of what is between the first output and the last."""
        return not self.request.stream

    @abstractmethod
    def events(self) -> AsyncGenerator[str, None]:
        """The stream's events as `ended` wants them."""

    @abstractmethod
    def text(self) -> str:
        """The whole answer as JSON, once every prompt has finished."""

    async def respond(self) -> Response:
        """The HTTP answer; a stream begins with the engine's first output, so earlier faults are HTTP's."""
        self.require_room()
        if self.state.options.log_requests:
            self._log()
        if self.request.stream:
            events = self.events()
            first = await anext(events)  # what fails before it can still be an HTTP error
            return EventStream(self.ended(first, events), keep_alive=self.state.options.keep_alive_seconds)
        async for _ in self.outputs():
            pass
        return Response(self.text(), media_type="application/json")

    def require_room(self) -> None:
        """Raises OverloadedError where the engine has too much to do for all of this."""
        num_sequences = sum(work.params.n for work in self.work)
        self.state.engine.require_room(num_sequences, sum(len(work.token_ids) for work in self.work))

    def _log(self) -> None:
        """What is asked, for an operator who wants to know; texts are bounded, and on one line."""
        for work in self.work:
            text = work.text or self.state.engine.tokenizer.decode(work.token_ids, skip_special_tokens=False)
            shown = text if len(text) <= MAX_LOGGED else f"{text[:MAX_LOGGED]}..."
            logger.info(
                "request %s: %d tokens, %r, %s", self.id, len(work.token_ids), shown, work.params.chosen()
            )

    def ended(self, first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """All events, `first` among them, with what ends a stream, well or not."""
        return ended_in_order(first, events)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt, output) as they come; closing this aborts what still runs."""
        unique = uuid.uuid4().hex[:8]  # clients choose ids, and may choose the same
        sources = [self._source(work, f"{self.id}-{unique}-{i}") for i, work in enumerate(self.work)]
        if len(sources) == 1:  # the usual case, without a task for each output
            async with aclosing(sources[0]) as source:
                async for output in source:
                    self.latest[0] = output
                    yield 0, output
            return
        async with aclosing(merge(sources)) as merged:
            async for index, output in merged:
                self.latest[index] = output
                yield index, output

    def _source(self, work: Work, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        if self.request.use_beam_search:
            return beams.search(self.state, self.request, work.token_ids, work.params, request_id)
        return self.state.engine.generate(
            {"prompt": work.text, "prompt_token_ids": work.token_ids},
            work.params,
            request_id,
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            whole=self.whole,
        )

    def usage(self) -> Usage:
        """Token counts so far."""
        return usage_of([output for output in self.latest if output is not None], generated=self.generated)


class ChunkedAnswer(Answer):
    """An answer of choices, streamed in chunks of them; `progress` is what was said of each choice."""

    def __init__(
        self, state: ServerState, request: GenerationRequest, answer_id: str, work: Sequence[Work]
    ) -> None:
        super().__init__(state, request, answer_id, work)
        self.progress: dict[int, Progress] = {}
        self._texts: dict[int, TextEvents] = {}  # of choices of which only text is new, until they finish

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput, completion: CompletionOutput) -> list[Body]:
        """What a stream says of choice `index` now that its request has this output."""

    @abstractmethod
    def text_chunk(self, index: int, text: str) -> Body:
        """The chunk that adds text to choice `index`, and nothing else."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether most chunks of the stream do nothing but add text."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Body:
        """The chunk without choices that ends a stream with token counts."""

    @abstractmethod
    def body(self) -> Body:
        """The whole answer, once every prompt has finished."""

    def text(self) -> str:
        """As JSON."""
        return self.body().json_text()

    async def events(self) -> AsyncGenerator[str, None]:
        """The stream's events, without the last `[DONE]`."""
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                if said := "".join(self._said(index, output)):
                    yield said
        if self.request.include_usage or self.state.options.force_usage:
            yield event(self.usage_chunk(self.usage()).json_text())

    def _said(self, prompt: int, output: RequestOutput) -> Iterator[str]:
        for completion in output.outputs:
            index = prompt * len(output.outputs) + completion.index
            if completion.finish_reason is None and (texts := self._texts.get(index)) is not None:
                if (delta := self.progress[index].take(completion)) is not None:
                    yield texts.of(delta.text)
                continue
            for chunk in self.chunks(index, output, completion):
                yield event(chunk.json_text())
            if self.is_plain and index in self.progress:  # the first chunk, which may say more, is out
                self._texts[index] = TextEvents(partial(self.text_chunk, index))

    def usage_field(self) -> dict[str, Usage]:
        """`usage` for a chunk: only where the client wants it in every one."""
        wanted = self.request.continuous_usage or self.state.options.force_usage
        return {"usage": self.usage()} if wanted else {}


def encoded(state: ServerState, text: str, keep: int | None, *, add_special_tokens: bool) -> list[int]:
    """The text's tokens, for `truncated` to cut; ApiError where all must fit and cannot, before encoding."""
    engine = state.engine
    if keep is None:
        check_room(engine.tokenizer.least_tokens(text), engine.max_model_len, at_least=True)
    return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def truncated(token_ids: list[int], keep: int | None, max_model_len: int) -> list[int]:
    """The last `keep` tokens (-1: as many as the context holds; None: all)."""
    if keep is None:
        return token_ids
    return token_ids[len(token_ids) - min(len(token_ids), max_model_len - 1 if keep == -1 else keep) :]
