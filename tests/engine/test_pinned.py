"""Host memory outlives the kernels that use it, and no longer than it must."""

import weakref

import pytest
import torch

from qinfer.engine.pinned import Pinned


class Event:
    """What the stream has come to, by hand."""

    def __init__(self) -> None:
        self.recorded = self.over = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        return self.over


def test_memory_is_kept_until_the_stream_has_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    pinned = Pinned(torch.device("cuda"))
    events, alive = [], []
    for _ in range(3):
        tensor = torch.zeros(4)
        alive.append(weakref.ref(tensor))
        events.append(pinned.keep(tensor))
        del tensor
    assert all(ref() is not None for ref in alive)
    events[1].over = True  # a stream comes to its events in order: to this one never before the first
    pinned.keep(torch.zeros(4))
    assert all(ref() is not None for ref in alive)
    events[0].over = True
    pinned.keep(torch.zeros(4))
    assert [ref() is None for ref in alive] == [True, True, False]


def test_a_cpu_has_its_numbers_at_once() -> None:
    pinned = Pinned(torch.device("cpu"))
    tensor = pinned.empty(3)
    assert (tensor.dtype, tensor.shape, tensor.is_pinned()) == (torch.int64, (3,), False)
    assert pinned.keep(tensor) is None
