"""One call of a tool as a model writes it, `{"name": ..., "arguments": {...}}`, read as it grows.

Streams pass arguments on while the model still writes them, so the object is walked character by character
and never parsed as a whole. Only its own keys and values are told apart; what stands inside the arguments is
passed on unread, since it is the client who knows what it means.
"""

from __future__ import annotations

import json

ARGUMENTS = frozenset({"arguments", "parameters"})


class CallObject:
    """`name` once it is known; `is_done` after the closing brace; `is_broken` where this is no such object.

    `raw` is all that was read, for whoever has to show it after all.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self.raw = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the value that is being read
        self._text = ""  # of a key, or of a value that is not passed on at once
        self._passes_on = self._has_arguments = False
        self._arguments = ""  # that were not returned yet

    def feed(self, text: str) -> tuple[str, str]:
        """Reads on; returns what there is of new arguments, and the text behind the object's end."""
        rest = ""
        for i, char in enumerate(text):
            if self.is_done or self.is_broken:
                rest = text[i:]
                break
            self.raw += char
            self._take(char)
        if self.name is None:
            return "", rest
        ready, self._arguments = self._arguments, ""
        return ready, rest

    def _take(self, char: str) -> None:
        if self._in_string:
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._keep(char)
        elif self._depth == 0:
            self._depth = int(char == "{")
            self.is_broken = not (char == "{" or char.isspace())
        elif self._depth == 1 and char == ":" and self._key is None:
            self._end_key()
        elif self._depth == 1 and char in ",}":
            self._end_value()
            self._end_object(char)
        else:
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self.is_broken = self._depth == 0
            self._keep(char)

    def _keep(self, char: str) -> None:
        if self._key in ARGUMENTS and not self._text and not self._in_string:
            outside = self._depth == 1
            self._passes_on = self._passes_on or char == "{"
            if outside and char.isspace():
                return
        if self._passes_on:
            self._arguments += char
        else:
            self._text += char

    def _end_key(self) -> None:
        key = _parsed(self._text)
        self.is_broken = not isinstance(key, str)
        self._key, self._text = str(key), ""
        self._has_arguments = self._has_arguments or self._key in ARGUMENTS

    def _end_value(self) -> None:
        if self._key is None:
            self.is_broken = bool(self._text.strip())
        elif self._key == "name":
            name = _parsed(self._text)
            self.is_broken = not isinstance(name, str)
            self.name = name if isinstance(name, str) else None
        elif self._key in ARGUMENTS and not self._passes_on:
            value = _parsed(self._text)  # some models write them as a string, or null for none
            self._arguments = value if isinstance(value, str) else "{}" if value is None else self._text
        self._key, self._text, self._passes_on = None, "", False

    def _end_object(self, char: str) -> None:
        if char == "}" and not self.is_broken:
            self.is_done = self.name is not None
            self.is_broken = not self.is_done
            if not self._has_arguments:
                self._arguments = "{}"


def _parsed(text: str) -> object:
    """The JSON value; a text that is none is taken for None, which nothing here expects."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
