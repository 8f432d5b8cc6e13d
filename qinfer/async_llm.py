"""An engine in a thread of its own, fed from asyncio: what the HTTP server and async programs talk to.

One thread owns the `Engine` and is the only one to touch it. Whoever wants something puts a command on a
queue (add this request, abort that one, stop); the thread obeys all commands between two steps, steps while
there is work, sleeps on the queue while there is none. What a step yields goes to each request's `Mailbox`
by `call_soon_threadsafe`, once per step and event loop. A mailbox holds the latest output only: outputs are
cumulative, so a slow reader loses nothing and no queue can grow.

A consumer that stops listening (cancelled, closed, gone) aborts its request. When the engine raises, every
request, waiting or new, ends with EngineDeadError and the thread lives on only to say so; `shutdown` ends all
requests with EngineStoppedError and joins the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from qinfer.engine.admission import check_prompt, check_text
from qinfer.errors import EngineDeadError, UserError
from qinfer.llm_keywords import refuse
from qinfer.mailbox import LiveRequest, Mailbox, put_all, since
from qinfer.outputs import CompletionOutput, RequestOutput
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.stat_log import StatLog

if TYPE_CHECKING:  # a server takes its port before it spends seconds on importing torch
    from qinfer.engine.engine import Engine
    from qinfer.engine.options import EngineStats
    from qinfer.engine.pooling import Pooling
    from qinfer.llm import LLM
    from qinfer.structured_outputs import StructuredOutputsParams
    from qinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]  # {"prompt": ...} or {"prompt_token_ids": ...}


class EngineStoppedError(EngineDeadError):
    """The engine was shut down on purpose; another server may answer."""


class Observer(Protocol):
    """Told what happens to requests, always on the engine's thread; times are `time.monotonic` seconds."""

    def added(self, request_id: str, params: SamplingParams, arrival: float) -> None:
        """The engine has taken the request in."""
        ...

    def stepped(
        self, outputs: Sequence[RequestOutput], stats: EngineStats, now: float, seconds: float
    ) -> None:
        """A step that took `seconds` has ended with these outputs."""
        ...

    def ended(self, request_id: str, reason: str) -> None:
        """The request ended without a last output: nobody wants it ("abort") or the engine died ("error")."""
        ...


class AsyncEngineArgs:
    """What `AsyncLLM.from_engine_args` loads: a model and the other keywords of `LLM`."""

    def __init__(self, model: str, **keywords: Any) -> None:
        self.model, self.keywords = model, keywords


class AsyncLLM:
    """Runs an LLM's engine for asyncio: `async for output in engine.generate(prompt, params, "id")`.

    Takes the engine over: from here on only this object may use it, and `LLM.generate` on the same model is a
    mistake. Requests may come from any event loop. `shutdown` must be called at the end.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.tokenizer: Tokenizer = llm.get_tokenizer()
        self.default_sampling_params: SamplingParams = llm.get_default_sampling_params()
        self.stats: EngineStats = llm.engine.stats()  # after the latest step
        self.dead_error: EngineDeadError | None = None
        self._engine: Engine = llm.engine
        self._observers: tuple[Observer, ...] = ()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing is handed over after the command to stop
        self._stopping = False
        self._stopped = False
        self._paused = False
        self._handed_over = 0
        self._stat_log = StatLog(self.stats)
        self._live: dict[str, LiveRequest] = {}  # the engine's thread only
        self._thread = threading.Thread(target=self._run, name="qinfer-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Loads the model that the arguments name; raises as `LLM`."""
        from qinfer.llm import LLM

        return cls(LLM(engine_args.model, **engine_args.keywords))

    # ---- for everyone

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and answer, in tokens."""
        return self._engine.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """The model's: ids are below it."""
        return self._engine.vocab_size

    @property
    def num_waiting(self) -> int:
        """Requests that wait: in the engine's queue or on their way to it."""
        return self.stats.num_waiting + self._handed_over

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return not self._stopping and not self.errored

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has died or was stopped."""
        if self.dead_error is not None:
            raise self.dead_error
        if self._stopping:
            raise EngineStoppedError("the engine was shut down")

    def compile(self, form: StructuredOutputsParams) -> None:
        """Gets a grammar ready, on any thread, in up to a second; UserError where it is none."""
        self._engine.grammars.compile(form)

    def observe(self, observer: Observer) -> None:
        """Tells `observer` of every request from now on."""
        self._observers += (observer,)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The answer to a question about the engine, put to it between two steps; raises EngineDeadError."""
        await self.check_health()
        loop, answer = asyncio.get_running_loop(), asyncio.Future[T]()

        def tell(found: T) -> None:
            if not answer.done():  # cancelled meanwhile
                answer.set_result(found)

        def put() -> None:
            found = question(self._engine)
            with contextlib.suppress(RuntimeError):  # that loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(tell, found)

        with self._gate:
            if self._stopping:
                raise EngineStoppedError("the engine was shut down")
            self._commands.put(put)
        return await answer

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, between two steps; raises EngineDeadError."""
        return await self.ask(lambda engine: engine.reset_prefix_cache())

    async def pause_generation(self) -> None:
        """Stops after the step that runs; requests wait until `resume_generation`."""
        self._commands.put(partial(setattr, self, "_paused", True))

    async def resume_generation(self) -> None:
        """Goes on where `pause_generation` stopped."""
        self._commands.put(partial(setattr, self, "_paused", False))

    async def wait_for_requests_to_drain(self, timeout: float = 300.0) -> None:
        """Returns when no request runs or waits; TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            while self.stats.num_running or self.num_waiting:
                await asyncio.sleep(0.02)

    async def do_log_stats(self) -> None:
        """Logs throughput and occupancy since the last such line, which busy engines write by themselves."""
        self._stat_log.write(self.stats, time.monotonic())

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's state whenever it has grown, the last time with `finished` set.

        `prompt` is text, token ids, or a mapping with `prompt` or `prompt_token_ids`; `request_id` must not
        be in use. Content is cumulative; a slow reader sees fewer, longer outputs. With `pooling` the last
        one has an `embedding`. Raises UserError for what can never run and EngineDeadError. Closing or
        cancelling the iteration aborts the request.
        """
        refuse(lora_request=lora_request)
        text, token_ids = await self._prompt(prompt)
        params = sampling_params or self.default_sampling_params
        if params.structured_outputs is not None:  # may take a second, which the engine's thread must not
            await asyncio.to_thread(self.compile, params.structured_outputs)
        request = LiveRequest(request_id, token_ids, params, Mailbox(), text, priority, cache_salt, pooling)
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
                self._commands.put(partial(self._abort, request))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests by id; their consumers see a last output with finish_reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._commands.put(partial(self._abort_by_id, one))

    def shutdown(self, timeout: float | None = None) -> bool:
        """Ends every request with EngineStoppedError and joins the thread, after the step it is in.

        Returns whether the thread has ended within `timeout` seconds (None: waits as long as it takes).
        """
        with self._gate:
            if not self._stopping:
                self._stopping = True
                self._commands.put(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- on the caller's loop

    async def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: Any = prompt
        ids: Any = None
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif not isinstance(prompt, str):
            text, ids = None, prompt
        if ids is not None:  # here, before a batch mate's stream begins, since a status cannot be taken back
            return text, check_prompt(ids, self._engine.vocab_size)
        if not isinstance(text, str):
            raise UserError(
                'a prompt is text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}', "prompt"
            )
        check_text(text, self.tokenizer, self.max_model_len)
        return text, await asyncio.to_thread(self.tokenizer.encode, text)

    def _hand_over(self, request: LiveRequest) -> None:
        with self._gate:
            if self._stopping:
                raise EngineStoppedError("the engine was shut down")
            if self.dead_error is not None:
                raise self.dead_error
            self._handed_over += 1
            self._commands.put(partial(self._add, request))

    # ---- on the engine's thread

    def _run(self) -> None:
        while not self._stopped or not self._commands.empty():
            try:
                self._obey()
                if self._has_work():
                    self._step()
            except Exception as error:  # whatever it was, the engine's state cannot be trusted any more
                self._die(error)

    def _obey(self) -> None:
        """Runs all commands at hand; waits for one when the engine has nothing to do."""
        if not self._has_work():
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        if self.dead_error is None:
            self.stats = self._engine.stats()

    def _has_work(self) -> bool:
        return self.dead_error is None and not self._paused and self._engine.has_unfinished()

    def _step(self) -> None:
        began = time.monotonic()
        outputs = self._engine.step()
        self.stats = self._engine.stats()
        now = time.monotonic()
        self._stat_log.tick(self.stats, now)
        for observer in self._observers:
            observer.stepped(outputs, self.stats, now, now - began)
        mail = []
        for output in outputs:
            request = self._live.get(output.request_id)
            if request is None:  # aborted since the step was planned
                continue
            request.latest = output
            mail.append((request.mailbox, output))
            if output.finished:
                del self._live[output.request_id]
        self._deliver(mail)

    def _add(self, request: LiveRequest) -> None:
        with self._gate:
            self._handed_over -= 1
        if self.dead_error is not None:
            return self._deliver([(request.mailbox, self.dead_error)])
        try:
            self._engine.add(
                request.request_id,
                request.token_ids,
                request.params,
                prompt=request.prompt,
                priority=request.priority,
                arrival_time=request.arrival_time,
                cache_salt=request.cache_salt,
                pooling=request.pooling,
            )
        except (UserError, NotImplementedError) as error:
            return self._deliver([(request.mailbox, error)])
        except Exception as error:  # a bug in `add` may have left half a request behind
            self._die(error)
            return self._deliver([(request.mailbox, EngineDeadError("the engine has died"))])
        self._live[request.request_id] = request
        if request.pooling is not None:  # observers count generation
            return
        for observer in self._observers:
            observer.added(request.request_id, request.params, request.arrival)

    def _abort(self, request: LiveRequest) -> None:
        if self._live.get(request.request_id) is not request or self.dead_error is not None:
            return  # never taken in, or finished meanwhile; the id may belong to another request by now
        del self._live[request.request_id]
        self._engine.abort(request.request_id)
        for observer in self._observers:
            observer.ended(request.request_id, "abort")

    def _abort_by_id(self, request_id: str) -> None:
        request = self._live.get(request_id)
        if request is not None:
            self._abort(request)
            self._deliver([(request.mailbox, request.aborted())])

    def _die(self, error: Exception) -> None:
        logger.error("the engine has died", exc_info=error)
        self.dead_error = EngineDeadError(f"the engine has died ({type(error).__name__})")
        self.stats = self.stats._replace(num_running=0, num_waiting=0, kv_usage=0.0)
        self._deliver([(request.mailbox, self.dead_error) for request in self._live.values()])
        for request_id in self._live:
            for observer in self._observers:
                observer.ended(request_id, "error")
        self._live.clear()

    def _stop(self) -> None:
        stopped = EngineStoppedError("the engine was shut down")
        for request in list(self._live.values()):
            self._abort(request)
            self._deliver([(request.mailbox, stopped)])
        self._live.clear()
        self._stopped = True

    def _deliver(self, mail: Sequence[tuple[Mailbox, RequestOutput | Exception]]) -> None:
        by_loop = defaultdict(list)
        for mailbox, content in mail:
            by_loop[mailbox.loop].append((mailbox, content))
        for loop, letters in by_loop.items():
            try:
                loop.call_soon_threadsafe(put_all, letters)
            except RuntimeError:  # that loop was closed with requests in flight: nobody waits there any more
                logger.debug("an event loop was closed before its %d answers came", len(letters))
