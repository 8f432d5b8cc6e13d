"""What AsyncLLM asks of an engine and its thread, beside requests.

Functions of a module, because a question may have to go to another process, which finds them by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qinfer.sampling_params import SamplingParams
from qinfer.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from qinfer.engine.engine import Engine
    from qinfer.engine_thread import EngineThread

T = TypeVar("T")


def unanswered() -> Future[Any]:
    """An answer to come, out of reach of an asker who leaves: a cancelled Future could not be answered."""
    answer = Future[Any]()
    answer.set_running_or_notify_cancel()
    return answer


def of_the_engine(question: Callable[[Engine], T], thread: EngineThread) -> T:
    """Whatever there is to ask of the engine between two steps."""
    return question(thread.engine)


def pause(paused: bool, thread: EngineThread) -> None:
    """Stops stepping, or goes on."""
    thread.paused = paused


def start_trace(prefix: str | None, thread: EngineThread) -> None:
    """Records what the thread does; raises as `Trace.start`."""
    thread.trace.start(prefix)


def stop_trace(thread: EngineThread) -> Path:
    """The file of the recording; raises as `Trace.stop`."""
    return thread.trace.stop()


def log_stats(thread: EngineThread) -> None:
    """Writes the log's line of averages now."""
    thread.log_stats()


def compile_form(form: StructuredOutputsParams, engine: Engine) -> None:
    """Gets a grammar ready; UserError where it is none."""
    engine.grammars.compile(form)


def spell_bad_words(params: SamplingParams, engine: Engine) -> None:
    """Gets a request's forbidden words ready."""
    engine.bad_words.of(params)
