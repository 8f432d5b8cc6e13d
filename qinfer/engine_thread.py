"""The thread that owns an engine: the only one to touch it, told what to do by commands.

Whoever wants something puts a command on a queue (add this request, abort that one, stop); the thread obeys
all commands between two steps, steps while there is work, sleeps on the queue while there is none, and tells
what has happened as `Reports`.

When the engine raises, every request, waiting or new, ends with EngineDeadError and the thread lives on only
to say so; `stop` ends all requests with EngineStoppedError and then the thread.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from qinfer.audience import Reports
from qinfer.engine_questions import unanswered
from qinfer.errors import EngineDeadError, EngineStoppedError, UserError
from qinfer.live_request import Ask
from qinfer.output_parts import Cutter
from qinfer.stat_log import INTERVAL, StatLog
from qinfer.trace import Trace

if TYPE_CHECKING:  # a server takes its port before it spends seconds on importing torch
    from qinfer.engine.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]


@contextmanager
def threads_left_to_the_engine() -> Iterator[None]:
    """Within it a model is loaded by one thread of the processor, for another thread to run.

    OpenMP keeps threads for each thread that has computed in parallel. Where all of them together outnumber
    the processors, GNU's sleep between two parallel regions instead of waiting awake, and to be woken costs
    an engine whose steps have hundreds of regions a fifth of its speed.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class _Live(NamedTuple):
    """A request that the engine has, and what of its outputs was told."""

    ask: Ask
    cutter: Cutter


class EngineThread:
    """Runs `engine`; `paused` keeps it from stepping, `trace` records what it does."""

    def __init__(self, engine: Engine, reports: Reports) -> None:
        self.engine, self.trace = engine, Trace()
        self.paused = False
        self._reports = reports
        self._stat_log = StatLog(engine.stats())
        self._dead_error: EngineDeadError | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopped = False
        self._live: dict[str, _Live] = {}  # the thread only
        self._thread = threading.Thread(target=self._run, name="qinfer-engine", daemon=True)
        self._thread.start()

    # ---- for everyone

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def is_awake(self) -> bool:
        """As this process is."""
        return True

    def put(self, ask: Ask) -> None:
        """Hands a request over."""
        self._commands.put(partial(self._add, ask))

    def abort(self, number: int, request_id: str) -> None:
        """Ends a request; one that has ended is no mistake."""
        self._commands.put(partial(self._abort, request_id, number))

    def abort_by_id(self, request_id: str) -> None:
        """Ends the request of that id; an unknown one is no mistake."""
        self._commands.put(partial(self._abort, request_id))

    def ask(self, question: Callable[[EngineThread], T]) -> Future[T]:
        """The answer to a question that is put between two steps; only the asker's own mistake is his."""
        answer: Future[T] = unanswered()
        self._commands.put(partial(self._answer, question, answer))
        return answer

    def aside(self, question: Callable[[Engine], T]) -> T:
        """The answer to a question that needs no pause between steps, found by the caller's thread."""
        return question(self.engine)

    def stop(self, timeout: float | None) -> bool:
        """Ends every request and the thread, after the step it is in; whether it has ended in `timeout` s.

        Nothing may be put afterwards; to stop again is to go on waiting.
        """
        self._commands.put(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- for questions

    def log_stats(self) -> None:
        """Writes the line of averages now."""
        self._stat_log.write(self.engine.stats(), time.monotonic())

    # ---- on the thread

    def _run(self) -> None:
        while not self._stopped or not self._commands.empty():
            try:
                self._obey()
                if self._has_work():
                    self._step()
            except BaseException as error:  # whatever it was, the engine's state cannot be trusted any more
                self._die(error)

    def _obey(self) -> None:
        """Runs all commands at hand; waits for one when the engine has nothing to do."""
        obeyed = False
        while not self._has_work():
            try:
                self._commands.get(timeout=INTERVAL)()
                obeyed = True
                break
            except queue.Empty:
                self._tick(time.monotonic())
        while not self._commands.empty():
            self._commands.get()()
            obeyed = True
        if obeyed and self._dead_error is None:
            self._reports.counted(self.engine.stats())

    def _has_work(self) -> bool:
        return self._dead_error is None and not self.paused and self.engine.has_unfinished()

    def _tick(self, now: float) -> None:
        if self._dead_error is None:
            self._stat_log.tick(self.engine.stats(), now)

    def _step(self) -> None:
        began = time.monotonic()
        outputs = self.engine.step()
        stats = self.engine.stats()
        now = time.monotonic()
        self._stat_log.tick(stats, now)
        parts = []
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:  # aborted since the step was planned
                continue
            parts.append((live.ask.number, live.cutter.cut(output)))
            if output.finished:
                del self._live[output.request_id]
        self._reports.stepped(parts, stats, now, now - began)

    def _add(self, ask: Ask) -> None:
        if self._dead_error is not None:
            return self._reports.refused(ask.number, self._dead_error)
        try:
            ask.enter(self.engine)
        except (UserError, NotImplementedError) as error:
            return self._reports.refused(ask.number, error)
        except Exception as error:  # a bug in `add` may have left half a request behind
            return self._die(error)
        self._live[ask.request_id] = _Live(ask, Cutter())
        self._reports.entered(ask.number)

    def _abort(self, request_id: str, number: int | None = None) -> None:
        live = self._live.get(request_id)
        if live is None or number not in (None, live.ask.number):
            return  # never taken in, or finished meanwhile; the id may belong to another request by now
        self._end(live.ask, None)

    def _end(self, ask: Ask, error: EngineStoppedError | None) -> None:
        del self._live[ask.request_id]
        self.engine.abort(ask.request_id)
        self._reports.ended(ask.number, error)

    def _answer(self, question: Callable[[EngineThread], T], answer: Future[T]) -> None:
        try:
            answer.set_result(question(self))
        except UserError as mistake:
            answer.set_exception(mistake)
        except BaseException:
            answer.set_exception(EngineDeadError("the engine has died of the question"))
            raise

    def _die(self, error: BaseException) -> None:
        logger.error("the engine has died", exc_info=error)
        self._live.clear()
        self._dead_error = EngineDeadError(f"the engine has died ({type(error).__name__})")
        self._reports.died(self._dead_error)

    def _stop(self) -> None:
        for live in list(self._live.values()):
            self._end(live.ask, EngineStoppedError("the engine was shut down"))
        self._stopped = True
