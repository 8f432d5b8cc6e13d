"""The gate's result as a JSON document and as Markdown, both from the same contents so that they agree.

The Markdown says the verdict first, then why, then every measure with its interval and limit, then all that
is needed to get the same numbers again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from qinfer.evals.gate import GateResult
from qinfer.evals.statistics import CONFIDENCE

_VERDICT = {
    "PASS": "PASS: it may be served in place of its source",
    "FAIL": "FAIL: it is not close enough to its source to be served in its place",
    "UNDECIDED": "UNDECIDED: what was measured does not decide it, so it is not served",
}


def contents(result: GateResult) -> dict[str, Any]:
    """JSON-ready contents of the certificate; a number that is not finite becomes null."""
    measures = [
        {
            "name": measure.name,
            "unit": measure.unit,
            "value": _finite(measure.interval.value),
            "low": _finite(measure.interval.low),
            "high": _finite(measure.interval.high),
            "bound": measure.bound if measure.verdict else None,
            "limit": measure.limit,
            "verdict": measure.verdict and str(measure.verdict),
        }
        for measure in result.measures
    ]
    return {
        "verdict": str(result.verdict),
        "reasons": list(result.reasons),
        "confidence": CONFIDENCE,
        "measures": measures,
        "settings": dict(result.settings),
    }


def markdown(document: Mapping[str, Any]) -> str:
    """The report of a document made by `contents`."""
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


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _number(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.4g}"


def _cell(text: str) -> str:
    """Text that cannot break out of a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
