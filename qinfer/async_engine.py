"""An engine that computes elsewhere, on a thread or in a process of its own, as asyncio sees it.

What is known of it is here at any time: the model's card, the counts of its latest step, whether it lives.
Whatever else somebody wants to know or to have done is a question, put to it between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qinfer import engine_questions as questions
from qinfer.audience import Audience, Observer
from qinfer.engine_process import EngineProcess
from qinfer.engine_thread import EngineThread
from qinfer.errors import EngineDeadError, EngineSilentError
from qinfer.model_card import card_of
from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:  # a server takes its port before it spends seconds on importing torch
    from qinfer.engine.engine import Engine
    from qinfer.engine.options import EngineStats
    from qinfer.llm import LLM
    from qinfer.structured_outputs import StructuredOutputsParams
    from qinfer.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncEngine:
    """The engine of `llm`, which it takes over; `card` says what the model is."""

    def __init__(self, llm: LLM | EngineProcess) -> None:
        self._seat: EngineThread | EngineProcess
        if isinstance(llm, EngineProcess):
            self.card, self._audience, self._seat = llm.card, llm.audience, llm
        else:
            self.card, self._audience = card_of(llm), Audience(llm.engine.stats())
            self._seat = EngineThread(llm.engine, self._audience)
        self.tokenizer: Tokenizer = self.card.tokenizer
        self.default_sampling_params: SamplingParams = self.card.defaults

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and answer, in tokens."""
        return self.card.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """The model's: ids are below it."""
        return self.card.vocab_size

    @property
    def pid(self) -> int:
        """The process that the engine runs in."""
        return self._seat.pid

    @property
    def stats(self) -> EngineStats:
        """The engine's counts after its latest step."""
        return self._audience.stats

    @property
    def num_waiting(self) -> int:
        """Requests that wait: in the engine's queue or on their way to it."""
        return self.stats.num_waiting + self._audience.num_underway

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What the engine has died of."""
        return self._audience.dead_error

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return not self._audience.is_stopping and not self.errored

    @property
    def is_awake(self) -> bool:
        """Whether the engine's process runs: one may live and yet be stopped or frozen."""
        return self._seat.is_awake

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has died, was stopped, or gives no sign of life."""
        self._audience.check()
        if not self.is_awake:
            raise EngineSilentError("the engine's process gives no sign of life: is it stopped or frozen?")

    def compile(self, form: StructuredOutputsParams) -> None:
        """Gets a grammar ready, on any thread, in up to a second; UserError where it is none."""
        self._seat.aside(partial(questions.compile_form, form))

    def observe(self, observer: Observer) -> None:
        """Tells `observer` of every request from now on."""
        self._audience.observers += (observer,)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The answer to a question about the engine, put to it between two steps.

        Where the engine is in another process, the question and its answer must be such as can be pickled.
        Raises UserError as the question does, and EngineDeadError.
        """
        return await self._ask(partial(questions.of_the_engine, question))

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, between two steps; raises EngineDeadError."""
        return await self.ask(methodcaller("reset_prefix_cache"))

    async def start_profile(self, prefix: str | None = None) -> None:
        """Records what the engine's thread does; UserError where it does already or has nowhere to."""
        await self._ask(partial(questions.start_trace, prefix))

    async def stop_profile(self) -> Path:
        """Ends the recording and returns its file; UserError where there is none."""
        return await self._ask(questions.stop_trace)

    async def pause_generation(self) -> None:
        """Stops after the step that runs; requests wait until `resume_generation`."""
        await self._ask(partial(questions.pause, True))

    async def resume_generation(self) -> None:
        """Goes on where `pause_generation` stopped."""
        await self._ask(partial(questions.pause, False))

    async def do_log_stats(self) -> None:
        """Logs throughput and occupancy since the last such line, which busy engines write by themselves."""
        await self._ask(questions.log_stats)

    async def _ask(self, question: Callable[[EngineThread], T]) -> T:
        with self._audience.lock:
            self._audience.check()
            answer = self._seat.ask(question)
        return await asyncio.wrap_future(answer)
