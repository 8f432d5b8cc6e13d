"""Responses that may be asked for again or built on, in memory, the latest ones only; and those under way.

A response in the background is here from its first moment: while it is made, `jobs` has it, then `get`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qinfer.server.errors import ApiError
from qinfer.server.response_input import ChatMessages

if TYPE_CHECKING:
    from qinfer.server.response_jobs import Job

MAX_CHARS = 64 << 20


class Stored(NamedTuple):
    """A finished response, the conversation up to its end, and its events where it may be streamed again."""

    body: dict[str, Any]
    messages: ChatMessages
    events: Sequence[str]
    size: int


class ResponseStore:
    """Keeps MAX_CHARS characters of JSON; the oldest go first."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self.jobs: dict[str, Job] = {}  # responses in the background that are being made
        self._max_chars = max_chars
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, body: dict[str, Any], messages: ChatMessages, events: Sequence[str] = ()) -> None:
        """Keeps a response."""
        size = len(json.dumps([body, messages])) + sum(map(len, events))
        self._stored[body["id"]] = Stored(body, messages, events, size)
        self._size += size
        while self._size > self._max_chars:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """What was kept; ApiError 404 where there is nothing (any more), 400 where it is still being made."""
        if response_id in self.jobs:
            raise ApiError(400, f"the response {response_id[:100]!r} is not finished", param)
        if (stored := self._stored.get(response_id)) is None:
            raise ApiError(404, f"there is no response {response_id[:100]!r} (any more)", param)
        return stored

    def body(self, response_id: str) -> dict[str, Any]:
        """The response as it is now; raises as `get`."""
        job = self.jobs.get(response_id)
        return self.get(response_id).body if job is None else job.body()

    def delete(self, response_id: str) -> None:
        """Forgets a finished response; raises as `get`."""
        self._size -= self.get(response_id).size
        del self._stored[response_id]
