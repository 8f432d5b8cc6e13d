"""An engine in a process of its own: the side of those who wait for it.

Writing a token to a client costs about as much of an interpreter as making it costs on a GPU, and one
interpreter does one of both at a time. So a server forks before it has loaded anything: the child loads the
model and runs the engine (`engine_child`), this process keeps the port and the clients. Between them goes a
pipe with one message for each request and one for each step, which holds what the step has added to all
texts. A thread writes into it and another one reads, so that a child that does not read keeps nobody from
serving or from leaving. The child ends when the pipe or this process does, so none is left behind.
"""

from __future__ import annotations

import logging
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

from qinfer.audience import Audience
from qinfer.engine_child import Closable, Ready, run_engine
from qinfer.engine_questions import unanswered
from qinfer.errors import EngineDeadError, EngineStoppedError
from qinfer.live_request import Ask
from qinfer.model_card import ModelCard
from qinfer.pulse import Pulse

if TYPE_CHECKING:
    from qinfer.engine.engine import Engine
    from qinfer.engine_thread import EngineThread
    from qinfer.llm import LLM

logger = logging.getLogger(__name__)

T = TypeVar("T")


KILLED = f"signal {signal.SIGKILL:d}"


class _Ended(BaseException):
    """The child has; raised wherever the main thread is, so no `except Exception` may take it for its own."""


class EngineProcess:
    """A child that loads a model and runs its engine; does for AsyncLLM what an `EngineThread` does.

    `card` and `audience` are there once it is `ready`.
    """

    card: ModelCard
    audience: Audience

    def __init__(self, load: Callable[[], LLM], *close: Closable) -> None:
        """Forks: no thread may run yet that the child would miss. The child closes `close` first."""
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(theirs, load, (self._pipe, *close)), name="qinfer-engine"
        )
        self._process.start()
        theirs.close()
        self._to_send: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = count()
        self._hearing = threading.Thread(target=self._hear, name="qinfer-hearing", daemon=True)
        self._sending = threading.Thread(target=self._write, name="qinfer-sending", daemon=True)

    def while_it_loads(self, work: Callable[[], object]) -> None:
        """Does something meanwhile, on the main thread; broken off where the child ends: `wait` says why."""

        def look(*_: object) -> None:
            if not self._process.is_alive():
                raise _Ended

        before = signal.getsignal(signal.SIGCHLD)
        with suppress(_Ended):
            try:
                signal.signal(signal.SIGCHLD, look)
                look()  # it may have ended before
                work()
            finally:
                signal.signal(signal.SIGCHLD, before)

    def wait(self) -> None:
        """Returns when the model is loaded; raises as `load`, EngineDeadError where the child just ended."""
        try:
            found = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            how = self._how()
            advice = ", as happens where memory runs out: `qinfer plan` says what a model needs"
            raise EngineDeadError(
                f"loading the model has ended its process ({how}){advice * (how == KILLED)}"
            ) from None
        if isinstance(found, BaseException):
            self._process.join()
            raise found
        assert isinstance(found, Ready)
        self.card, self.audience = found.card, Audience(found.stats)
        self._pulse = Pulse()
        self._hearing.start()
        self._sending.start()

    def kill(self) -> None:
        """Ends the child at once, whatever it does."""
        self._process.kill()
        self._process.join()

    # ---- as an EngineThread

    @property
    def pid(self) -> int:
        """The child."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def is_awake(self) -> bool:
        """Whether the child runs, as far as is known here."""
        return self._pulse.is_felt

    def put(self, ask: Ask) -> None:
        """Hands a request over."""
        self._send("put", ask)

    def abort(self, number: int, request_id: str) -> None:
        """Ends a request; one that has ended is no mistake."""
        self._send("abort", number, request_id)

    def abort_by_id(self, request_id: str) -> None:
        """Ends the request of that id; an unknown one is no mistake."""
        self._send("abort_by_id", request_id)

    def ask(self, question: Callable[[EngineThread], T]) -> Future[T]:
        """The answer to a question that is put between two steps."""
        return self._ask("ask", question)

    def aside(self, question: Callable[[Engine], T]) -> T:
        """The answer to a question that needs no pause between steps; the caller's thread waits for it."""
        return self._ask("aside", question).result()

    def stop(self, timeout: float | None) -> bool:
        """Ends every request and the child, after the step it is in; whether it has ended in `timeout` s."""
        self._send("stop")
        self._hearing.join(timeout)
        return not self._hearing.is_alive()

    # ---- sending

    def _ask(self, kind: str, question: Callable[..., T]) -> Future[T]:
        number, answer = next(self._numbers), unanswered()
        content = pickle.dumps(question, pickle.HIGHEST_PROTOCOL)  # apart: only its own answer depends on it
        with self.audience.lock:
            self.audience.check()
            self._asked[number] = answer
            self._send(kind, number, content)
        return answer

    def _send(self, *message: Any) -> None:
        """Never waits: the caller may be an event loop, and the child may have been stopped."""
        self._to_send.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _write(self) -> None:
        """On a thread of its own."""
        try:
            while True:
                self._pipe.send_bytes(self._to_send.get())
        except OSError:  # the child has ended, which `_hear` finds out and tells everybody
            return

    # ---- hearing, on a thread

    def _hear(self) -> None:
        hear: dict[str, Callable[..., None]] = {
            "counted": self.audience.counted,
            "entered": self.audience.entered,
            "refused": self.audience.refused,
            "stepped": self.audience.stepped,
            "ended": self.audience.ended,
            "died": self.audience.died,
            "answer": self._answer,
            "beat": lambda: None,
        }
        try:
            while True:
                kind, *content = pickle.loads(self._pipe.recv_bytes())
                self._pulse.felt()
                hear[kind](*content)
        except (EOFError, OSError):
            self._over()
        except Exception:  # a bug here would leave all clients waiting
            logger.exception("what the engine says was not understood")
            self._process.kill()
            self._over()

    def _over(self) -> None:
        """The child has ended, as it was told to or not."""
        self._pulse.end()
        self._process.join()
        ended: EngineDeadError = EngineStoppedError("the engine was shut down")
        if not self.audience.is_stopping:
            ended = EngineDeadError(f"the engine has died ({self._how()})")
            logger.error("%s", ended)
            self.audience.died(ended)
        self.audience.lost(ended)
        with self.audience.lock:
            for answer in self._asked.values():
                answer.set_exception(ended)

    def _answer(self, number: int, content: bytes, error: Exception | None) -> None:
        with self.audience.lock:
            answer = self._asked.pop(number)
        if error is not None:
            return answer.set_exception(error)
        try:
            found = pickle.loads(content)
        except Exception as reason:  # whatever the answer's own methods raise: the asker's mistake
            answer.set_exception(reason)
        else:
            answer.set_result(found)

    def _how(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit code {code}"
