"""Reading calls of tools out of a growing text, in the forms that models and our own grammars write.

A reader is fed pieces of text and tells what each brought: content for the reader of the answer, or parts of
calls. Content that may still turn out to be the beginning of a call is held back, like a stop string; what
looked like a call and was none comes out as content. Fed in one piece or in many, the sum is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qinfer.server.call_object import CallObject


@dataclass(frozen=True)
class CallPart:
    """What is new of a call: its name comes first and alone, then pieces of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


Part = str | CallPart


class CallReader(Protocol):
    """Reads one choice's text."""

    def feed(self, text: str) -> list[Part]:
        """What the text brings."""
        ...

    def finish(self) -> list[Part]:
        """What was held back: no more text will come."""
        ...


class NamedReader:
    """The whole text is the arguments of one call, whose name is known."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Part]:
        """The name with the first text."""
        if not text:
            return []
        name, self._name = self._name, None
        start: list[Part] = [] if name is None else [CallPart(0, name)]
        return [*start, CallPart(0, arguments=text)]

    def finish(self) -> list[Part]:
        """Nothing is held back."""
        return []


class _Calls:
    """Calls one after the other: numbers them and reads the object at hand."""

    def __init__(self) -> None:
        self.count = 0
        self.object = CallObject()
        self._is_named = False

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Parts of the object's call, and the text behind its end."""
        arguments, rest = self.object.feed(text)
        parts: list[Part] = []
        if self.object.name is not None and not self._is_named:
            self._is_named = True
            parts.append(CallPart(self.count, self.object.name))
        if arguments:
            parts.append(CallPart(self.count, arguments=arguments))
        if self.object.is_done:
            self.count += 1
            self.object, self._is_named = CallObject(), False
        return parts, rest


class ArrayReader:
    """`[{...}, {...}]`, which our grammar of a required call makes."""

    def __init__(self) -> None:
        self._calls = _Calls()

    def feed(self, text: str) -> list[Part]:
        """Parts of calls; brackets and commas between them mean nothing."""
        parts: list[Part] = []
        while text:
            if not self._calls.object.raw:
                text = text.lstrip("[], ")
            new, text = self._calls.feed(text)
            parts += new
        return parts

    def finish(self) -> list[Part]:
        """A call that was cut off stays as it is."""
        return []


class HermesReader:
    """`<tool_call>{...}</tool_call>` between texts: Hermes, Qwen and many others."""

    START, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._calls = _Calls()
        self._held = ""
        self._read = self._outside

    def feed(self, text: str) -> list[Part]:
        """Content up to a mark, then the call behind it."""
        self._held += text
        parts: list[Part] = []
        while True:
            before = self._held, self._read
            parts += self._read()
            if (self._held, self._read) == before:
                return parts

    def finish(self) -> list[Part]:
        """Held text, and a call that was cut off before its name."""
        rest, self._held = self._unheard() + self._held, ""
        return [rest] if rest.strip() or (rest and not self._calls.count) else []

    def _outside(self) -> list[Part]:
        content, mark, rest = self._held.partition(self.START)
        if mark:
            self._held, self._read = rest, self._object
            return [content.rstrip()] if content.strip() else []
        certain = content[: len(content) - _start_of(self.START, content)].rstrip()
        self._held = content[len(certain) :]  # space before a call belongs to nobody
        return [certain] if certain else []

    def _object(self) -> list[Part]:
        call = self._calls.object
        parts, self._held = self._calls.feed(self._held)
        if call.is_broken:
            content = self._unheard()
            self._calls.object, self._read = CallObject(), self._outside
            return [content] if content else parts
        if call.is_done:
            self._read = self._behind
        return parts

    def _behind(self) -> list[Part]:
        rest = self._held.lstrip()
        if not self.END.startswith(rest):  # else it may still come
            self._held, self._read = rest.removeprefix(self.END), self._outside
        elif rest == self.END:
            self._held, self._read = "", self._outside
        return []

    def _unheard(self) -> str:
        """What was read as a call of which the client has heard nothing: content after all."""
        call = self._calls.object
        return self.START + call.raw if self._read == self._object and call.name is None else ""


class JsonReader:
    """An answer that is nothing but calls, `{...}` or `{...}; {...}`: Llama 3.

    Only an object that names one of the `tools` is a call; all else is content.
    """

    MARK = "<|python_tag|>"

    def __init__(self, tools: Sequence[str]) -> None:
        self._tools = frozenset(tools)
        self._calls = _Calls()
        self._held = ""  # not read yet
        self._before = ""  # what stood before the object at hand
        self._is_content = False

    def feed(self, text: str) -> list[Part]:
        """Nothing until it is known whether this is a call."""
        self._held += text
        parts: list[Part] = []
        while self._held and not self._is_content and self._begins():
            parts += self._object()
        if self._is_content and self._held:
            content, self._held = self._held, ""
            parts.append(content)
        return parts

    def finish(self) -> list[Part]:
        """An object that was cut off before its name is content."""
        call = self._calls.object
        is_cut_off = call.raw and call.name is None and not self._is_content
        unheard = self._before + call.raw if is_cut_off else ""
        rest, self._held = unheard + self._held, ""
        return [rest] if rest.strip() or (rest and not self._calls.count) else []

    def _begins(self) -> bool:
        """Whether an object is at hand, or begins; settles whether this is content."""
        if self._calls.object.raw:
            return True
        rest = self._held.lstrip(" \t\r\n;,").removeprefix(self.MARK).lstrip()
        if not rest or self.MARK.startswith(rest):
            return False
        if rest[0] != "{":
            self._is_content = True
            return False
        self._before, self._held = self._held[: len(self._held) - len(rest)], rest
        return True

    def _object(self) -> list[Part]:
        call = self._calls.object
        parts, self._held = self._calls.feed(self._held)
        if call.is_broken or (call.name is not None and call.name not in self._tools):
            self._is_content = True
            self._held = self._before + call.raw + self._held
            return []
        return parts


def _start_of(mark: str, text: str) -> int:
    """Length of the longest end of `text` with which `mark` begins."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
