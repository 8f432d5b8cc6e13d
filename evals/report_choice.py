"""Several candidates on one page: a plot of size against quality, a table, and each one's measures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from qinfer.evals import plots
from qinfer.evals.report import markdown_row, to_json, write_text
from qinfer.evals.report_html import measures_table
from qinfer.evals.words import percent
from qinfer.webpage import page, table

_HEADER = ("model", "scheme", "MB", "tokens/s", "{}", "verdict", "")


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes .html, .md and .json of a document made by `Choice.to_dict`; UserError where that fails."""
    write_text(path.with_suffix(".html"), choice_page(document))
    write_text(path.with_suffix(".md"), choice_markdown(document))
    write_text(path.with_suffix(".json"), to_json(document))


def choice_page(document: Mapping[str, Any]) -> str:
    """The page for a browser."""
    source = document["source"]
    spots = [
        plots.Spot(
            option["name"],
            option["bytes"],
            option["quality"]["value"],
            option["quality"]["low"],
            option["quality"]["high"],
            f"{option['tokens_per_second']:.0f} tokens/s",
            option["worth_choosing"],
        )
        for option in document["options"]
        if None not in option["quality"].values()
    ]
    title = f"Candidates of {source['name']}"
    plot = (
        plots.pareto(spots, document["quality"], f"{title}: size and {document['quality']}") if spots else ""
    )
    rows = [[escape(cell) for cell in row] for row in _rows(document)]
    for row, option in zip(rows[1:], document["options"], strict=True):
        verdict = option["result"]["verdict"]
        row[5] = f'<span class="{verdict}">{verdict}</span>'
    header = [name.format(document["quality"]) for name in _HEADER]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<figure>{plot}<figcaption>The smaller, the further left; the better, the higher. The line joins "
        "those that passed and that no other beats in size, speed and quality together.</figcaption>"
        "</figure>",
        table(header, rows, (2, 3, 4)),
    ]
    for option in document["options"]:
        result = option["result"]
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in result["reasons"])
        parts.append(f"<h2>{escape(option['name'])}: {result['verdict']}</h2><ul>{reasons}</ul>")
        parts.append(measures_table(result))
    return page(title, "\n".join(parts))


def choice_markdown(document: Mapping[str, Any]) -> str:
    """The table alone."""
    header = [name.format(document["quality"]) for name in _HEADER]
    lines = [f"# Candidates of {document['source']['name']}", ""]
    for row in (header, ["---"] * len(header), *_rows(document)):
        lines.append(markdown_row(row))
    return "\n".join(lines) + "\n"


def _rows(document: Mapping[str, Any]) -> list[list[str]]:
    """The source, then the candidates."""
    source = document["source"]
    speed = source["tokens_per_second"]
    rows = [[source["name"], "dense", f"{source['bytes'] / 1e6:.1f}", f"{speed:.1f}", "", "", ""]]
    for option in document["options"]:
        q = option["quality"]
        rows.append(
            [
                option["name"],
                ", ".join(option["schemes"]),
                f"{option['bytes'] / 1e6:.1f}",
                f"{option['tokens_per_second']:.1f}",
                f"{percent(q['value'])} [{percent(q['low'])}, {percent(q['high'])}]",
                option["result"]["verdict"],
                "worth choosing" if option["worth_choosing"] else "",
            ]
        )
    return rows
