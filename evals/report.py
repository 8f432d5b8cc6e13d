"""The gate's result as Markdown, from the very document that the certificate holds, so that they agree.

The verdict first, then why, then every measure with its interval and limit, then all that is needed to get
the same numbers again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_VERDICT = {
    "PASS": "PASS: it may be served in place of its source",
    "FAIL": "FAIL: it is not close enough to its source to be served in its place",
    "UNDECIDED": "UNDECIDED: what was measured does not decide it, so it is not served",
}


def markdown(document: Mapping[str, Any]) -> str:
    """The report of a document made by `GateResult.to_dict`."""
    lines = [f"# {_VERDICT[document['verdict']]}", ""]
    lines += [f"* {reason}" for reason in document["reasons"]]
    percent = f"{document['confidence']:.0%}"
    lines += ["", f"| measure | value | {percent} interval | required | |", "|---|---|---|---|---|"]
    lines += [_row(measure) for measure in document["measures"]]
    lines += ["", "Intervals: bootstrap over windows of text. A measure passes when its whole interval does."]
    lines += ["", "## Settings", "", "| | |", "|---|---|"]
    for name, value in document["settings"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"| {name.replace('_', ' ')} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _row(measure: Mapping[str, Any]) -> str:
    required = f"{measure['bound']} {measure['limit']:.4g}" if measure["verdict"] else ""
    value = f"{_number(measure['value'])} {measure['unit']}".rstrip()
    interval = f"{_number(measure['low'])} to {_number(measure['high'])}"
    return f"| {measure['name']} | {value} | {interval} | {required} | {measure['verdict'] or 'reported'} |"


def _number(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.4g}"


def _cell(text: str) -> str:
    """Text that cannot break out of a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
