"""What a person or a machine cannot do, told in one line: what is wrong, the value, what to do or read."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from qinfer import env

_INVALID = "Invalid value"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or name another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name a place that you may write to"),
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
    """One line for what the system refuses; of the cache folder it says how to have another."""
    line = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    cache, place = env.cache_dir(), Path(os.path.abspath(error.filename)) if error.filename else None
    if place is not None and (place.is_relative_to(cache) or place in cache.parents):
        return f"{line}; models that were converted are kept in {cache}: QINFER_CACHE names another folder"
    return f"{line}; {_ADVICE[error.errno]}" if error.errno in _ADVICE else line
