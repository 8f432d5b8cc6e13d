"""An engine in a thread of its own, fed from asyncio: what the HTTP server and async programs talk to.

`async_engine` has what can be asked of the engine, `intake` the bound on what it takes on, `audience` those
who wait for outputs, `engine_thread` the thread. A request's outputs wait in its `Mailbox`, joined to one: a
slow reader loses nothing and no queue can grow. A consumer that stops listening (cancelled, closed, gone)
aborts its request. The thread may be in another process (`engine_process`), which no reader can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qinfer import engine_questions as questions
from qinfer.async_engine import AsyncEngine
from qinfer.engine.admission import check_prompt, check_text
from qinfer.engine_process import EngineProcess
from qinfer.engine_thread import threads_left_to_the_engine
from qinfer.errors import EngineDeadError
from qinfer.intake import Intake
from qinfer.live_request import Ask, LiveRequest
from qinfer.llm_keywords import refuse
from qinfer.mailbox import Mailbox, since
from qinfer.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from qinfer.prompts import Prompt, text_and_ids
from qinfer.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:  # a server takes its port before it spends seconds on importing torch
    from qinfer.engine.pooling import Pooling
    from qinfer.llm import LLM

_ABSENT = frozenset({"sleep", "wake_up", "is_sleeping", "add_lora", "remove_lora", "collective_rpc"})


class AsyncEngineArgs:
    """What `AsyncLLM.from_engine_args` loads: a model, the limits of `AsyncLLM`, other keywords of `LLM`."""

    def __init__(
        self,
        model: str,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        **keywords: Any,
    ) -> None:
        self.model, self.keywords = model, keywords
        self.max_num_queued_reqs, self.max_num_queued_tokens = max_num_queued_reqs, max_num_queued_tokens


class AsyncLLM(AsyncEngine):
    """Runs an LLM's engine for asyncio: `async for output in engine.generate(prompt, params, "id")`.

    Takes the engine over: from here on only this object may use it, and `LLM.generate` on the same model is a
    mistake. Requests may come from any event loop. `shutdown` must be called at the end. `card` says what
    the model is.
    """

    def __init__(
        self,
        llm: LLM | EngineProcess,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
    ) -> None:
        """Limits count sequences, and prompt tokens, that run or wait; UserError for those that are none."""
        self._intake = Intake(max_num_queued_reqs, max_num_queued_tokens, rejected=self._rejected)
        super().__init__(llm)

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise NotImplementedError(f"qinfer does not have AsyncLLM.{name}")
        raise AttributeError(f"AsyncLLM has no attribute {name!r}")

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Loads the model that the arguments name; raises as `LLM`."""
        from qinfer.llm import LLM

        with threads_left_to_the_engine():
            llm = LLM(engine_args.model, **engine_args.keywords)
        return cls(
            llm,
            max_num_queued_reqs=engine_args.max_num_queued_reqs,
            max_num_queued_tokens=engine_args.max_num_queued_tokens,
        )

    def require_room(self, num_sequences: int, num_tokens: int) -> None:
        """OverloadedError where the limits leave no room for that much now, UserError where never."""
        self._intake.check(num_sequences, num_tokens)

    async def wait_for_requests_to_drain(self, timeout: float = 300.0) -> None:
        """Returns when no request runs or waits; TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            while self._intake.num_sequences:
                await asyncio.sleep(0.02)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: Pooling | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's state whenever it has grown, the last time with `finished` set.

        `prompt` is text, token ids, or a mapping with `prompt` or `prompt_token_ids`; `request_id` must not
        be in use. Content is cumulative; a slow reader sees fewer, longer outputs. With `whole`, as with
        FINAL_ONLY, only the last one comes; with `pooling` it has an `embedding`. Raises UserError for what
        can never run, OverloadedError where a limit is reached, and EngineDeadError. Closing or cancelling
        the iteration aborts the request.
        """
        refuse(lora_request=lora_request)
        text, token_ids = await self._prompt(prompt)
        params = sampling_params or self.default_sampling_params
        if params.output_kind is RequestOutputKind.FINAL_ONLY:  # all is told: an abort's output is to hold it
            params, whole = replace(params, output_kind=RequestOutputKind.CUMULATIVE), True
        if params.structured_outputs is not None:  # may take a second, which the engine's thread must not
            await asyncio.to_thread(self.compile, params.structured_outputs)
        if params.bad_words:  # as above: it spells them, and the engine finds them spelled
            await asyncio.to_thread(self._seat.aside, partial(questions.spell_bad_words, params))
        ask = Ask(request_id, token_ids, params, text, priority, cache_salt, pooling)
        leave = partial(self._intake.leave, params.n, len(token_ids))
        request = LiveRequest(ask, Mailbox(ask, whole=whole), leave)
        self._hand_over(request)
        finished = False
        seen: dict[int, CompletionOutput] = {}
        try:
            while not finished:
                output = await request.mailbox.take()
                finished = output.finished
                yield since(output, seen) if params.output_kind is RequestOutputKind.DELTA else output
        finally:
            if not finished:
                self._seat.abort(ask.number, request_id)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: None,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[EmbeddingRequestOutput, None]:
        """Yields the prompt's vector of length 1, pooled as the model's folder says; raises as `generate`."""
        refuse(pooling_params=pooling_params)
        from qinfer.engine.pooling import pooling_of

        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        keywords: dict[str, Any] = {"lora_request": lora_request, "priority": priority}
        pooling = pooling_of(self.card.path)
        async for output in self.generate(prompt, params, request_id, pooling=pooling, **keywords):
            if output.embedding is not None:
                vector = EmbeddingOutput(output.embedding)
                yield EmbeddingRequestOutput(request_id, vector, output.prompt_token_ids)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests by id; their consumers see a last output with finish_reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._seat.abort_by_id(one)

    def shutdown(self, timeout: float | None = None) -> bool:
        """Ends every request with EngineStoppedError and joins the thread, after the step it is in.

        Returns whether the thread has ended within `timeout` seconds (None: waits as long as it takes).
        """
        with self._audience.lock:
            self._audience.is_stopping = True
        return self._seat.stop(timeout)

    async def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text, ids = text_and_ids(prompt)
        if text is None or ids is not None:
            # checked before a batch mate's stream begins, since a status cannot be taken back
            return text, check_prompt(ids, self.vocab_size)
        check_text(text, self.tokenizer, self.max_model_len)
        return text, await asyncio.to_thread(self.tokenizer.encode, text)

    def _hand_over(self, request: LiveRequest) -> None:
        self._intake.enter(request.ask.params.n, len(request.ask.token_ids))
        try:
            with self._audience.lock:
                self._audience.expect(request)
                self._seat.put(request.ask)
        except EngineDeadError:
            request.left()
            raise

    def _rejected(self, reason: str) -> None:
        for observer in self._audience.observers:
            observer.reject(reason)
