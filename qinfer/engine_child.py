"""An engine in a process of its own: the child's side, from the model's files to the last request.

The engine runs on a thread as it does anywhere else; what it reports goes into the pipe instead of to
readers. Another thread reads what the other side wants. A pipe that ends means that nobody is there any
more: the child leaves at once, in the middle of a step if need be. Linux kills it even where it was stopped.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from qinfer.engine_thread import EngineThread
from qinfer.errors import EngineDeadError, EngineStoppedError, QinferError, UserError
from qinfer.heap import settle_heap
from qinfer.live_request import Ask
from qinfer.model_card import ModelCard, card_of
from qinfer.output_parts import Part
from qinfer.pulse import start_beating

if TYPE_CHECKING:
    from qinfer.engine.options import EngineStats
    from qinfer.llm import LLM

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
NUM_ASIDE = 8  # threads for questions, some of which take a second


class Closable(Protocol):
    """A socket, or an end of a pipe."""

    def close(self) -> None:
        """Closes it."""
        ...


class Ready(NamedTuple):
    """The model is loaded."""

    card: ModelCard
    stats: EngineStats


def run_engine(pipe: Connection, load: Callable[[], LLM], close: Sequence[Closable]) -> NoReturn:
    """Loads a model and runs its engine until it is told to stop, then ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they come to all of a group, and the other side decides
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # when the thread that forked has ended
    for one in close:
        one.close()
    wishes, tell = Wishes(pipe), Messages(pipe)
    try:
        llm = load()
        ready = Ready(card_of(llm), llm.engine.stats())
    except Exception as error:  # whatever it is, the other side raises it
        error.add_note(traceback.format_exc())
        tell.send(portable(error))
    else:
        settle_heap()
        wishes.fulfil(EngineThread(llm.engine, tell), tell)
        tell.send(ready)
        start_beating(partial(tell.send, ("beat",)))
        wishes.stopped.wait()
    try:
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(0)  # not sys.exit: a question may still be worked on, which nobody waits for


class Wishes:
    """What the other side wants, read on a thread from the beginning, so that its end is never missed."""

    def __init__(self, pipe: Connection) -> None:
        self.stopped = threading.Event()
        self._pipe = pipe
        self._pool = ThreadPoolExecutor(NUM_ASIDE, "qinfer-aside")
        threading.Thread(target=self._read, name="qinfer-wishes", daemon=True).start()

    def fulfil(self, thread: EngineThread, tell: Messages) -> None:
        """By this thread; nothing is wanted before the other side knows that the model is loaded."""
        self._thread, self._tell = thread, tell

    def _read(self) -> None:
        while True:
            try:
                kind, *content = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            getattr(self, f"_{kind}")(*content)

    def _put(self, ask: Ask) -> None:
        self._thread.put(ask)

    def _abort(self, number: int, request_id: str) -> None:
        self._thread.abort(number, request_id)

    def _abort_by_id(self, request_id: str) -> None:
        self._thread.abort_by_id(request_id)

    def _ask(self, number: int, question: bytes) -> None:
        self._pool.submit(self._answer, number, lambda: self._thread.ask(pickle.loads(question)).result())

    def _aside(self, number: int, question: bytes) -> None:
        self._pool.submit(self._answer, number, lambda: self._thread.aside(pickle.loads(question)))

    def _stop(self) -> None:
        threading.Thread(target=self._stop_thread, name="qinfer-stopping", daemon=True).start()

    def _stop_thread(self) -> None:
        self._thread.stop(None)
        self.stopped.set()

    def _answer(self, number: int, find: Callable[[], object]) -> None:
        """Asks and answers aside: the thread that reads must go on, or both sides could wait to write."""
        try:
            found, error = pickle.dumps(find(), pickle.HIGHEST_PROTOCOL), None
        except Exception as mistake:  # of the question, or an answer that cannot go over: the asker's
            found, error = b"", portable(mistake)
        self._tell.send(("answer", number, found, error))


class Messages:
    """`Reports` that become messages."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, content: object) -> None:
        """Anything."""
        written = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._pipe.send_bytes(written)

    def counted(self, stats: EngineStats) -> None:
        """As `Reports` says, like the following."""
        self.send(("counted", stats))

    def entered(self, number: int) -> None:
        self.send(("entered", number))

    def refused(self, number: int, error: Exception) -> None:
        self.send(("refused", number, error))

    def stepped(
        self, parts: Sequence[tuple[int, Part]], stats: EngineStats, now: float, seconds: float
    ) -> None:
        self.send(("stepped", parts, stats, now, seconds))

    def ended(self, number: int, error: EngineStoppedError | None) -> None:
        self.send(("ended", number, error))

    def died(self, error: EngineDeadError) -> None:
        self.send(("died", error))


def portable(error: Exception) -> Exception:
    """The error, or where its kind cannot be pickled there and back, its words in one that can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as reason:  # whatever its own methods raise
        kinds: tuple[type[Exception], ...] = (UserError, QinferError, OSError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        other = kind(f"{type(error).__name__}: {error}")
        for note in (*getattr(error, "__notes__", ()), f"it came as text: {reason}"):
            other.add_note(note)
        return other
    return error
