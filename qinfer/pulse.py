"""A sign of life: whether another process runs at all, whatever it does.

A process may be alive and yet not run: stopped by a signal, frozen by its container, swapped out for good. A
thread there says once a second that it runs, also while a step takes minutes; a thread here counts the
seconds in which nothing was heard. It counts its own seconds instead of looking at a clock, so that a machine
on which both have been stopped together raises no alarm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT = 1.0  # seconds
SILENCE = 30  # beats of which not one has come


class Pulse:
    """That of another process, as heard here, until the `end`."""

    def __init__(self) -> None:
        self._missed = 0
        self._over = threading.Event()
        threading.Thread(target=self._count, name="qinfer-pulse", daemon=True).start()

    def felt(self) -> None:
        """Something was heard."""
        self._missed = 0

    @property
    def is_felt(self) -> bool:
        """Whether the other process runs; one that stops is believed to for SILENCE beats."""
        return self._missed < SILENCE

    def end(self) -> None:
        """Nothing will be heard any more, and nobody is to wait for it."""
        self._over.set()

    def _count(self) -> None:
        while not self._over.wait(BEAT):
            self._missed += 1


def start_beating(beat: Callable[[], None]) -> None:
    """Calls `beat` once a second on a thread, until it raises OSError: nobody hears it any more."""

    def run() -> None:
        try:
            while True:
                time.sleep(BEAT)
                beat()
        except OSError:
            return

    threading.Thread(target=run, name="qinfer-beat", daemon=True).start()
