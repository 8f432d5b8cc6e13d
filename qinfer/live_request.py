"""A request of AsyncLLM's: `Ask` is what the engine gets of it, `LiveRequest` what stays with its reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from qinfer.mailbox import Mailbox
from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qinfer.engine.engine import Engine
    from qinfer.engine.pooling import Pooling

_numbers = count()


@dataclass
class Ask:
    """A request on its way to the engine, in this process or another.

    `number` tells it apart from a later request of the same id. `arrival` is `time.monotonic`, which is the
    same in all processes.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    pooling: Pooling | None = None
    arrival: float = field(default_factory=time.monotonic)
    arrival_time: float = field(default_factory=time.time)
    number: int = field(default_factory=lambda: next(_numbers))

    def enter(self, engine: Engine) -> None:
        """Becomes one of the engine's; raises as `Engine.add`."""
        engine.add(
            self.request_id,
            self.token_ids,
            self.params,
            prompt=self.prompt,
            priority=self.priority,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
            pooling=self.pooling,
        )


@dataclass
class LiveRequest:
    """A request whose end its reader waits for; `left` is called at the end."""

    ask: Ask
    mailbox: Mailbox
    left: Callable[[], None]
    entered: bool = False  # the engine has it
