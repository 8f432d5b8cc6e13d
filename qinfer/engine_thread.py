"""The thread that owns an engine: the only one to touch it, told what to do by commands.

Whoever wants something puts a command on a queue (add this request, abort that one, stop); the thread obeys
all commands between two steps, steps while there is work, sleeps on the queue while there is none. What a
step yields goes to each request's `Mailbox` by `call_soon_threadsafe`, once per step and event loop.

When the engine raises, every request, waiting or new, ends with EngineDeadError and the thread lives on only
to say so; `stop` ends all requests with EngineStoppedError and then the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from qinfer.errors import EngineDeadError, EngineStoppedError, UserError
from qinfer.mailbox import LiveRequest, Mailbox, put_all
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.stat_log import INTERVAL, StatLog

if TYPE_CHECKING:  # a server takes its port before it spends seconds on importing torch
    from qinfer.engine.engine import Engine
    from qinfer.engine.options import EngineStats

logger = logging.getLogger(__name__)

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


class Observer(Protocol):
    """Told what happens to requests, on the engine's thread; times are `time.monotonic` seconds."""

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

    def reject(self, reason: str) -> None:
        """A request was not let in, for one of `intake.REASONS`; told on its caller's thread."""
        ...


class EngineThread:
    """Runs `engine`; `stats` are those after its latest step, `dead_error` is set when it has died."""

    def __init__(self, engine: Engine, left: Callable[[LiveRequest], None]) -> None:
        """`left` is told of every request that was put and is over, on the thread."""
        self.stats: EngineStats = engine.stats()
        self.dead_error: EngineDeadError | None = None
        self.observers: tuple[Observer, ...] = ()
        self.stat_log = StatLog(self.stats)
        self.is_stopping = False
        self.paused = False
        self.num_underway = 0  # requests that were put and have not reached the engine
        self._engine, self._left = engine, left
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing is handed over after the command to stop
        self._stopped = False
        self._live: dict[str, LiveRequest] = {}  # the thread only
        self._thread = threading.Thread(target=self._run, name="qinfer-engine", daemon=True)
        self._thread.start()

    # ---- for everyone

    def put(self, request: LiveRequest) -> None:
        """Hands a request over; raises EngineDeadError where it will not be answered."""
        with self._gate:
            self.check()
            self.num_underway += 1
            self._commands.put(partial(self._add, request))

    def call(self, command: Command) -> None:
        """Has the thread run `command` between two steps; raises EngineDeadError where it never will."""
        with self._gate:
            self.check()
            self._commands.put(command)

    def abort(self, request: LiveRequest) -> None:
        """Ends a request that nobody reads any more; one that has ended is no mistake."""
        self._commands.put(partial(self._abort, request))

    def abort_by_id(self, request_id: str) -> None:
        """Ends a request, whose reader gets a last output; an unknown id is no mistake."""
        self._commands.put(partial(self._abort_by_id, request_id))

    def stop(self, timeout: float | None) -> bool:
        """Ends every request and the thread, after the step it is in; whether it has ended in `timeout` s."""
        with self._gate:
            if not self.is_stopping:
                self.is_stopping = True
                self._commands.put(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raises EngineDeadError when the engine has died or is to stop."""
        if self.dead_error is not None:
            raise self.dead_error
        if self.is_stopping:
            raise EngineStoppedError("the engine was shut down")

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
        while not self._has_work():
            try:
                self._commands.get(timeout=INTERVAL)()
                break
            except queue.Empty:
                self.stat_log.tick(self.stats, time.monotonic())
        while not self._commands.empty():
            self._commands.get()()
        if self.dead_error is None:
            self.stats = self._engine.stats()

    def _has_work(self) -> bool:
        return self.dead_error is None and not self.paused and self._engine.has_unfinished()

    def _step(self) -> None:
        began = time.monotonic()
        outputs = self._engine.step()
        self.stats = self._engine.stats()
        now = time.monotonic()
        self.stat_log.tick(self.stats, now)
        for observer in self.observers:
            observer.stepped(outputs, self.stats, now, now - began)
        mail = []
        for output in outputs:
            request = self._live.get(output.request_id)
            if request is None:  # aborted since the step was planned
                continue
            request.latest = output
            if output.finished or not request.whole:
                mail.append((request.mailbox, output))
            if output.finished:
                self._forget(request)
        self._deliver(mail)

    def _add(self, request: LiveRequest) -> None:
        with self._gate:
            self.num_underway -= 1
        try:
            if self.dead_error is not None:
                raise self.dead_error
            request.enter(self._engine)
        except (UserError, NotImplementedError, EngineDeadError) as error:
            self._left(request)
            return self._deliver([(request.mailbox, error)])
        except Exception as error:  # a bug in `add` may have left half a request behind
            self._left(request)
            self._die(error)
            return self._deliver([(request.mailbox, EngineDeadError("the engine has died"))])
        self._live[request.request_id] = request
        if request.pooling is not None:  # observers count generation
            return
        for observer in self.observers:
            observer.added(request.request_id, request.params, request.arrival)

    def _forget(self, request: LiveRequest) -> None:
        del self._live[request.request_id]
        self._left(request)

    def _abort(self, request: LiveRequest) -> None:
        if self._live.get(request.request_id) is not request or self.dead_error is not None:
            return  # never taken in, or finished meanwhile; the id may belong to another request by now
        self._forget(request)
        self._engine.abort(request.request_id)
        for observer in self.observers:
            observer.ended(request.request_id, "abort")

    def _abort_by_id(self, request_id: str) -> None:
        request = self._live.get(request_id)
        if request is not None:
            self._abort(request)
            self._deliver([(request.mailbox, request.aborted())])

    def _die(self, error: BaseException) -> None:
        logger.error("the engine has died", exc_info=error)
        self.dead_error = EngineDeadError(f"the engine has died ({type(error).__name__})")
        self.stats = self.stats._replace(num_running=0, num_waiting=0, kv_usage=0.0)
        self._deliver([(request.mailbox, self.dead_error) for request in self._live.values()])
        for request in list(self._live.values()):
            self._forget(request)
            for observer in self.observers:
                observer.ended(request.request_id, "error")

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
