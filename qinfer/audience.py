"""Those who wait for an engine: readers of requests, and observers of all of them.

An engine's thread tells what happens as `Reports`. Where it runs in this process, it tells an `Audience`
directly; where it runs in another, messages carry the same calls over (`engine_process`), so that a request
looks alike to its reader. Requests are told apart by number: ids come again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from qinfer.errors import EngineDeadError, EngineStoppedError
from qinfer.live_request import Ask, LiveRequest
from qinfer.mailbox import Letter, deliver
from qinfer.output_parts import Part

if TYPE_CHECKING:
    from qinfer.engine.options import EngineStats


class Observer(Protocol):
    """Told what happens to requests, on one thread; times are `time.monotonic` seconds."""

    def added(self, ask: Ask) -> None:
        """The engine has taken the request in."""
        ...

    def stepped(
        self, parts: Sequence[tuple[int, Part]], stats: EngineStats, now: float, seconds: float
    ) -> None:
        """A step that took `seconds` has ended at `now`; by number, what it adds to the requests' outputs."""
        ...

    def ended(self, number: int, reason: str) -> None:
        """The request ended without a last output: nobody wants it ("abort") or the engine died ("error")."""
        ...

    def reject(self, reason: str) -> None:
        """A request was not let in, for one of `intake.REASONS`; told on its caller's thread."""
        ...


class Reports(Protocol):
    """What an engine's thread tells, in this order of a request: entered, stepped..., at most one end."""

    def counted(self, stats: EngineStats) -> None:
        """The engine's counts between two steps."""
        ...

    def entered(self, number: int) -> None:
        """The engine has taken the request in."""
        ...

    def refused(self, number: int, error: Exception) -> None:
        """The engine has not."""
        ...

    def stepped(
        self, parts: Sequence[tuple[int, Part]], stats: EngineStats, now: float, seconds: float
    ) -> None:
        """A step that took `seconds` has ended at `now`; a last part ends its request."""
        ...

    def ended(self, number: int, error: EngineStoppedError | None) -> None:
        """The request was ended before its time, by `abort` or with this error."""
        ...

    def died(self, error: EngineDeadError) -> None:
        """The engine will do nothing any more; this ends all requests."""
        ...


class Audience:
    """Readers and observers; `stats` are the engine's latest, `dead_error` is set when it has died.

    `lock` is held where a request is expected and put, and where the engine is stopped: none may come after.
    """

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self.dead_error: EngineDeadError | None = None
        self.observers: tuple[Observer, ...] = ()
        self.is_stopping = False
        self.lock = threading.RLock()
        self.num_underway = 0  # requests that were put and have not reached the engine
        self._live: dict[int, LiveRequest] = {}

    def check(self) -> None:
        """Raises EngineDeadError when the engine has died or is to stop."""
        if self.dead_error is not None:
            raise self.dead_error
        if self.is_stopping:
            raise EngineStoppedError("the engine was shut down")

    def expect(self, request: LiveRequest) -> None:
        """A request is about to be put; raises as `check`. Called with the lock held."""
        self.check()
        self.num_underway += 1
        self._live[request.ask.number] = request

    def counted(self, stats: EngineStats) -> None:
        """As `Reports` says."""
        self.stats = stats

    def entered(self, number: int) -> None:
        """As `Reports` says."""
        with self.lock:
            request = self._live.get(number)
            if request is None:
                return
            self.num_underway -= 1
            request.entered = True
        ask = request.ask
        if ask.pooling is None:  # observers count generation
            for observer in self.observers:
                observer.added(ask)

    def refused(self, number: int, error: Exception) -> None:
        """As `Reports` says."""
        if (request := self._forget(number)) is not None:
            deliver([(request.mailbox, error)])

    def stepped(
        self, parts: Sequence[tuple[int, Part]], stats: EngineStats, now: float, seconds: float
    ) -> None:
        """As `Reports` says."""
        self.stats = stats
        for observer in self.observers:
            observer.stepped(parts, stats, now, seconds)
        mail: list[Letter] = []
        for number, part in parts:
            about = part[1]
            is_last = about is not None and about.finished
            request = self._forget(number) if is_last else self._live.get(number)
            if request is not None:
                mail.append((request.mailbox, part))
        deliver(mail)

    def ended(self, number: int, error: EngineStoppedError | None) -> None:
        """As `Reports` says."""
        request = self._forget(number)
        if request is None:
            return
        for observer in self.observers:
            observer.ended(number, "abort")
        deliver([(request.mailbox, error)])

    def died(self, error: EngineDeadError) -> None:
        """As `Reports` says."""
        with self.lock:
            self.dead_error = error
        self.stats = self.stats._replace(num_running=0, num_waiting=0, kv_usage=0.0)
        self.lost(error)

    def lost(self, error: EngineDeadError) -> None:
        """Ends all requests by an error."""
        with self.lock:
            requests = [self._forget(number) for number in list(self._live)]
        gone = [request for request in requests if request is not None]
        deliver([(request.mailbox, error) for request in gone])
        for request in gone:
            for observer in self.observers if request.entered else ():
                observer.ended(request.ask.number, "error")

    def _forget(self, number: int) -> LiveRequest | None:
        with self.lock:
            request = self._live.pop(number, None)
            if request is not None and not request.entered:
                self.num_underway -= 1
        if request is not None:
            request.left()
        return request
