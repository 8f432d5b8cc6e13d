"""The gate's result on paper, from the very document that the certificate holds, so that they agree.

The verdict first, then why, then every measure with its interval and limit, tasks, what went another way, and
all that is needed to get the same numbers again: as Markdown here, for a browser in `report_html`, and as the
JSON of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from qinfer.errors import UserError
from qinfer.evals.gate import GateResult
from qinfer.evals.report_html import report_page
from qinfer.evals.words import HEADLINE, number, percent

Kind = Literal["html", "md", "json"]


def write(path: Path, result: GateResult, kinds: Sequence[Kind] = ("html", "md", "json")) -> None:
    """Writes the report to `path` with each kind as its suffix; UserError where that cannot be written."""
    document = result.to_dict()
    texts = {
        "html": lambda: report_page(document, result.examples),
        "md": lambda: markdown(document, result.examples),
        "json": lambda: to_json({**document, "examples": dict(result.examples)}),
    }
    for kind in kinds:
        write_text(path.with_suffix(f".{kind}"), texts[kind]())


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file; raises UserError naming it where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"the report {path} cannot be written: {error.strerror}", "report") from error


def markdown(document: Mapping[str, Any], examples: Mapping[str, Any] | None = None) -> str:
    """The report of a document made by `GateResult.to_dict`, and of its examples."""
    verdict = document["verdict"]
    headline = HEADLINE[verdict]
    lines = [f"# {verdict}: {headline[0].lower()}{headline[1:]}", ""]
    lines += [f"* {reason}" for reason in document["reasons"]]
    lines += ["", "| measure | value | interval | required | | passes at | fails at |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [_measure(measure) for measure in document["measures"]]
    levels = sorted({percent(measure["confidence"]) for measure in document["measures"]})
    lines += [
        "",
        f"Intervals ({', '.join(levels) or 'none'}): bootstrap over windows of text, over questions or the "
        "passages they share. A measure passes when its whole interval does. True values as in the last "
        f"columns are found with a probability of {percent(document.get('power', 0.8))}.",
    ]
    lines += [
        *_blame(document.get("blame")),
        *_offer(document.get("offer")),
        *_tasks(document.get("evidence", {})),
    ]
    lines += [*_examples(examples or {}), *_spent(document.get("evidence", {}))]
    lines += ["", "## Settings", "", "| | |", "|---|---|"]
    for name, value in document["settings"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"| {name.replace('_', ' ')} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _measure(measure: Mapping[str, Any]) -> str:
    required = f"{measure['bound']} {measure['limit']:.4g}" if measure["verdict"] else ""
    value = f"{number(measure['value'])} {measure['unit']}".rstrip()
    interval = f"{number(measure['low'])} to {number(measure['high'])}"
    power = measure.get("power") or {}
    ends = [number(power[end]) if power else "" for end in ("passes_at", "fails_at")]
    return markdown_row([measure["name"], value, interval, required, measure["verdict"] or "reported", *ends])


def _tasks(evidence: Mapping[str, Any]) -> list[str]:
    results = evidence.get("tasks", [])
    if not results:
        return []
    header = ("task", "questions", "source", "candidate", "difference", "lost / won", "McNemar p", "recovery")
    lines = ["", "## Tasks", "", markdown_row(header), markdown_row(["---"] * len(header))]
    for one in results:
        d = one["difference"]
        lines.append(
            markdown_row(
                [
                    f"{one['task']} ({one['metric']})",
                    str(one["items"]),
                    percent(one["source"]),
                    percent(one["candidate"]),
                    f"{percent(d['value'])} [{percent(d['low'])}, {percent(d['high'])}]",
                    f"{one['lost']} / {one['won']}",
                    number(one["p_value"]),
                    "no better than chance" if one["recovery"] is None else percent(one["recovery"]),
                ]
            )
        )
    return lines


def _blame(blame: Mapping[str, Any] | None) -> list[str]:
    return ["", "## Where it comes from", "", blame["line"]] if blame else []


def _offer(offer: Mapping[str, Any] | None) -> list[str]:
    return ["", "## What would pass", "", offer["line"]] if offer else []


def _examples(examples: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for one in examples.get("regressions", []):
        lines += ["", f"### {one['task']}, question {one['question']}", "", *_quoted(one["prompt"]), ""]
        lines += [markdown_row(["right", "source", "candidate"]), markdown_row(["---"] * 3)]
        lines += [markdown_row([one["target"], one["source"], one["candidate"]])]
    lines = ["", "## Worst regressions", *lines] if lines else []
    moved = examples.get("moved", [])
    if moved:
        header = ("text", "KL, nats", "source", "candidate")
        lines += ["", "## Where the text moved most", "", markdown_row(header), markdown_row(["---"] * 4)]
    for one in moved:
        said = [
            ", ".join(f"{t['token']!r} {percent(t['probability'])}" for t in one[who][:3])
            for who in ("source", "candidate")
        ]
        lines.append(markdown_row([f"… {one['context'][-120:]}", number(one["kl"]), *said]))
    return lines


def _spent(evidence: Mapping[str, Any]) -> list[str]:
    lines = [
        f"* {one['name']}: {one['done']} of {one['size']} {one['unit']} in {one['seconds']:.1f} s"
        + ("" if one["needed"] is None else f"; about {one['needed']} would decide it")
        for one in evidence.get("spent", [])
    ]
    return ["", "## What was measured", "", *lines] if lines else []


def _quoted(text: str) -> Iterable[str]:
    """A block of code that no run of backticks in it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *text.split("\n"), fence]


def markdown_row(cells: Iterable[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Text that cannot break out of a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("\r", " ")


def to_json(document: Mapping[str, Any]) -> str:
    """Standard JSON; raises ValueError for a number that is not finite."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
