"""Free text with tagged parts that have a form: what tools without a grammar of their own are called in.

A structural tag says: write as you like, but once you have written a trigger, go on with the beginning of one
of these structures, then JSON of its schema, then its end. vLLM's and XGrammar's form of it: {"triggers":
["<function="], "structures": [{"begin": "<function=get>", "schema": {...}, "end": "</function>"}]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qinfer.errors import UserError

MAX_TAGS = 256


class Tag(NamedTuple):
    """One structure; `begin` starts with `trigger`."""

    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


def parse_tags(value: str | Mapping[str, Any]) -> tuple[Tag, ...]:
    """The structures of a structural tag, as an object or its JSON text; UserError where it is none."""
    asked: Any = value
    if isinstance(value, str):
        try:
            asked = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(f"is no valid JSON: {error}") from None
    if not isinstance(asked, Mapping):
        raise _wrong(f"is an object, not {asked!r:.100}")
    if asked.get("format") is not None:
        raise NotImplementedError(
            "qinfer does not have structured_outputs.structural_tag.format: give structures and triggers"
        )
    structures, triggers = asked.get("structures"), asked.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise _wrong(f"needs structures, a list of 1 to {MAX_TAGS}")
    if not isinstance(triggers, list) or not triggers or not all(map(_is_text, triggers)):
        raise _wrong("needs triggers, a list of texts that are not empty")
    return tuple(_tag(one, triggers) for one in structures)


def tags_grammar(tags: Sequence[Tag], is_token: Callable[[str], bool], spacing: Mapping[str, Any]) -> str:
    """The tags as a Lark grammar; `is_token`: whether a text is a special token, which no characters spell.

    `spacing` are llguidance's options for what may stand between two parts of JSON.
    """
    names = [f"tag_{i}" for i in range(len(tags))]
    rules = [f"start: ({' | '.join(names)})* TEXT", r"TEXT: /(.|\n)*/"]
    for name, tag in zip(names, tags, strict=True):
        trigger = f"TEXT {tag.trigger}"
        if not is_token(tag.trigger):
            rules.append(f"{name}_trigger[lazy]: TEXT {_quoted(tag.trigger)}")
            trigger = f"{name}_trigger"
        schema = json.dumps({**tag.schema, "x-guidance": spacing})
        rest, end = _quoted(tag.begin.removeprefix(tag.trigger)), _quoted(tag.end)
        rules.append(f"{name}: {trigger} {rest} %json {schema} {end}")
    return "\n".join(rules)


def _tag(structure: Any, triggers: Sequence[str]) -> Tag:
    if not isinstance(structure, Mapping) or not _is_text(structure.get("begin")):
        raise _wrong(f"has a structure without a begin: {structure!r:.100}")
    begin, end = structure["begin"], structure.get("end")
    if not isinstance(end, str):
        raise _wrong(f"has a structure without an end: {begin!r:.100}")
    if not isinstance(structure.get("schema"), Mapping):
        raise _wrong(f"has a structure whose schema is no object: {begin!r:.100}")
    trigger = next((one for one in triggers if begin.startswith(one)), None)
    if trigger is None:
        raise _wrong(f"has a structure that begins with none of its triggers: {begin!r:.100}")
    return Tag(trigger, begin, structure["schema"], end)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _wrong(what: str) -> UserError:
    return UserError(f"a structural tag {what}", "structural_tag")
