"""A stream's usual event, a chunk that only adds text, written without building the chunk for every token.

A thousand events of a stream differ in one string. The chunk is built and written once, with a mark in that
string's place, and from then on only the string is: the form stays that of the models in `wire`, and costs a
tenth of it. Whatever says more than text (a finish, logprobs, ids, counts) is built as ever.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

from qinfer.server.streaming import event
from qinfer.server.wire import Body

_MARK = uuid.uuid4().hex  # no id or name of a model can hold it
_as_json = json.JSONEncoder(ensure_ascii=False).encode


class TextEvents:
    """Writes the events of one choice; `chunk` makes the chunk of a text."""

    def __init__(self, chunk: Callable[[str], Body]) -> None:
        self._before, self._after = event(chunk(_MARK).json_text()).split(f'"{_MARK}"')

    def of(self, text: str) -> str:
        """The event that adds `text`."""
        return f"{self._before}{_as_json(text)}{self._after}"
