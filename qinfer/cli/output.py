"""What a command prints: stdout belongs to the result, everything on the way goes to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any


@contextmanager
def stdout_kept_for_result() -> Iterator[None]:
    """Sends what libraries print while they work to stderr."""
    with redirect_stdout(sys.stderr):
        yield


def show(document: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Prints the result once: the document as JSON, or the text."""
    print(to_json(document) if as_json else text, flush=True)


def to_json(document: Mapping[str, Any]) -> str:
    """The document in standard JSON; a number that JSON does not know (NaN, infinity) becomes null."""
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for a person: the first flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
