"""A sign of life: what is made of one that does not come, and who beats when."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from qinfer import pulse
from qinfer.testing import wait_until


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT", 0.01)
    monkeypatch.setattr(pulse, "SILENCE", 3)


def started(start: Callable[[], object]) -> list[threading.Thread]:
    """The threads that it has started."""
    before = set(threading.enumerate())
    start()
    return [thread for thread in threading.enumerate() if thread not in before]


def test_a_pulse_is_felt_until_it_is_missed_for_long_and_again_when_it_comes_back() -> None:
    one = pulse.Pulse()
    assert one.is_felt
    wait_until(lambda: not one.is_felt)

    def comes_back() -> bool:
        one.felt()
        return one.is_felt

    wait_until(comes_back)
    one.end()


def test_nobody_counts_after_the_end() -> None:
    made: list[pulse.Pulse] = []
    (thread,) = started(lambda: made.append(pulse.Pulse()))
    made[0].end()
    thread.join()


def test_it_beats_until_nobody_hears_it() -> None:
    beats: list[None] = []
    seen = threading.Event()

    def beat() -> None:
        seen.wait()
        beats.append(None)
        if len(beats) == 3:
            raise BrokenPipeError

    (thread,) = started(lambda: pulse.start_beating(beat))
    seen.set()
    thread.join()
    assert len(beats) == 3
