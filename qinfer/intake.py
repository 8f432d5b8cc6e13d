"""How much an engine takes on at once: sequences and prompt tokens, running and waiting together.

Without a bound a queue only moves the failure: clients give up on answers that are still computed. What
is over the limit is refused at once, for the client to come back; the server says 503.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from qinfer.errors import OverloadedError, UserError, check_counts

REASONS = ("queue_full", "queued_tokens")


class Intake:
    """Counts what is in, and tells `rejected` by one of REASONS what is not let in."""

    def __init__(
        self,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
        *,
        rejected: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """None: no limit. UserError for limits that are none."""
        self._rejected = rejected
        check_counts(max_num_queued_reqs=max_sequences, max_num_queued_tokens=max_tokens)
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.num_sequences = self.num_tokens = 0
        self._lock = threading.Lock()

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """OverloadedError where so much more does not fit now, UserError where it never does."""
        for name, limit, there, more, reason in (
            ("sequences", self.max_sequences, self.num_sequences, num_sequences, REASONS[0]),
            ("prompt tokens", self.max_tokens, self.num_tokens, num_tokens, REASONS[1]),
        ):
            if limit is not None and more > limit:
                raise UserError(f"the request has {more} {name}, and at most {limit} are taken at once")
            if limit is not None and there + more > limit:
                self._rejected(reason)
                raise OverloadedError(
                    f"{there} {name} are running or waiting, of at most {limit}, and the request has {more}: "
                    "try again later",
                    reason,
                )

    def enter(self, num_sequences: int, num_tokens: int) -> None:
        """Counts more in; raises as `check`."""
        with self._lock:
            self.check(num_sequences, num_tokens)
            self.num_sequences += num_sequences
            self.num_tokens += num_tokens

    def leave(self, num_sequences: int, num_tokens: int) -> None:
        """Counts as much out."""
        with self._lock:
            self.num_sequences -= num_sequences
            self.num_tokens -= num_tokens
