"""What a person or a machine cannot do, told in one line: what is wrong, the value, what to do or read."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

import typer

_INVALID = "Invalid value"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or name another folder"),
    errno.EROFS: "name a place that may be written to",
}


def usage_line(error: typer.TyperException, arguments: Sequence[str], commands: Collection[str]) -> str:
    """One line for what typer refuses in `arguments`, ending with the help that says what is allowed."""
    from pydantic import ValidationError  # typer checks values with it, and imports it as late

    message = error.format_message().rstrip(".")
    if isinstance(error.__cause__, ValidationError) and message.startswith(_INVALID):
        value = error.__cause__.errors(include_url=False)[0]["input"]
        rule = message.removeprefix(_INVALID).replace(": Input should", ": it should").split(", unable to")[0]
        message = f"{_INVALID} {value!r:.100}{rule}"
    message = message[:1].lower() + message[1:]
    words = [word for word in arguments if not word.startswith("-")]
    for command in (" ".join(words[:2]), *words[:1]):
        if command in commands:
            return f"{message}; `qinfer {command} --help` lists what is allowed"
    return f"{message}; commands: {', '.join(commands)} (`qinfer --help` says more)"


def system_line(error: OSError) -> str:
    """One line for what the system refuses, with what to do where that is plain."""
    places = [str(place) for place in (error.filename, error.filename2) if place is not None]
    line = ": ".join([error.strerror or str(error), " -> ".join(places)]).removesuffix(": ")
    return f"{line}; {_ADVICE[error.errno]}" if error.errno in _ADVICE else line
