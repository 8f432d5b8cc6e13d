"""Responses that may be asked for again or built on, in memory, the latest ones only."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from qinfer.server.errors import ApiError
from qinfer.server.response_input import ChatMessages

MAX_CHARS = 64 << 20


class Stored(NamedTuple):
    """A finished response, and the conversation up to its end."""

    body: dict[str, Any]
    messages: ChatMessages
    size: int


class ResponseStore:
    """Keeps MAX_CHARS characters of JSON; the oldest go first."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, body: dict[str, Any], messages: ChatMessages) -> None:
        """Keeps a response."""
        size = len(json.dumps([body, messages]))
        self._stored[body["id"]] = Stored(body, messages, size)
        self._size += size
        while self._size > self._max_chars:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """What was kept; ApiError 404 where there is nothing (any more)."""
        if (stored := self._stored.get(response_id)) is None:
            raise ApiError(404, f"there is no response {response_id[:100]!r} (any more)", param)
        return stored

    def delete(self, response_id: str) -> None:
        """Forgets a response; ApiError 404 where there is none."""
        self._size -= self.get(response_id).size
        del self._stored[response_id]
