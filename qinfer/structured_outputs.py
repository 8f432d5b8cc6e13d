"""Which form an answer must have: a grammar in one of six spellings, checked as far as needs no model.

What is checked here costs nothing; whether the grammar itself can be compiled, the engine says when it takes
the request in (`qinfer.engine.structured`). Every refusal is a `UserError` that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qinfer.errors import UserError
from qinfer.nesting import is_deeper
from qinfer.structural_tags import Tag, parse_tags

MAX_DEPTH = 64  # of a schema: deeper ones are attacks or mistakes
# between parts of JSON; without a bound a small model, once it has begun to indent, may never stop
WHITESPACE = r"[ \t\n]{0,32}"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of `json` (a schema), `regex`, `choice` (texts), `grammar` (Lark or GBNF), `json_object`,
    `structural_tag` (see `structural_tags`).

    JSON may be spaced as the model likes, within bounds; `disable_any_whitespace` leaves none and
    `whitespace_pattern` is a regex for what may stand between two parts of it. Raises UserError.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            named = " and ".join(self._given()) or "none"
            raise UserError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, not {named}",
                "structured_outputs",
            )
        self._check_texts()
        if self.choice is not None:
            _check_choice(self.choice)
        if self.json is not None:
            _check_schema(self.schema(), "json")
        for tag in self.tags():
            _check_schema(tag.schema, "structural_tag")
            for text in (tag.begin, tag.end):
                _check_unicode(text, "structural_tag")

    @property
    def kind(self) -> str:
        """Which one was given."""
        return self._given()[0]

    def schema(self) -> Any:
        """The JSON schema as an object; UserError where its text is none."""
        if not isinstance(self.json, str):
            return self.json
        try:
            return json.loads(self.json)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the JSON schema is no valid JSON: {error}", "json") from None

    def tags(self) -> tuple[Tag, ...]:
        """The structures of the structural tag; UserError where it is none."""
        return () if self.structural_tag is None else parse_tags(self.structural_tag)

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) not in (None, False)]

    def _check_texts(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is None:
                continue
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{name} must be a text that is not empty, not {text!r:.100}", name)
            if "\x00" in text:
                raise UserError(f"{name} has a NUL character, which is no text", name)
            _check_unicode(text, name)


def _check_choice(choice: Any) -> None:
    if not isinstance(choice, Sequence) or isinstance(choice, str) or not choice:
        raise UserError(f"choice must be a list of texts that is not empty, not {choice!r:.100}", "choice")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise UserError(f"choice must hold texts that are not empty, not {text!r:.100}", "choice")
        _check_unicode(text, "choice")


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} holds text that is not valid Unicode: {text!r:.100}", name) from None


def _check_schema(schema: Any, name: str) -> None:
    if not isinstance(schema, Mapping):
        raise UserError(f"a JSON schema is an object, not {schema!r:.100}", name)
    if is_deeper(schema, MAX_DEPTH):
        raise UserError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels", name)
