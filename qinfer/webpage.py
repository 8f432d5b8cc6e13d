"""What the reports for a browser share: one file without a script, its style, tables, and plots as SVG.

A page is read in light and dark and on paper; colours and fonts are the style sheet's, for plots too. Each
plot has a role and a title for who cannot see it, and no number that is not also in a table nearby.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH = 640  # of a plot, in its own units


def page(title: str, body: str) -> str:
    """A whole HTML file."""
    style = Path(__file__).with_name("webpage.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Cells are HTML already; columns in `numeric` are flush right."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="n"' if i in numeric else "" for i in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'
    )


def axis(left: float, y: float, right: float = WIDTH - 8) -> str:
    """A horizontal line."""
    return f'<line class="axis" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>'


def text(x: float, y: float, words: str) -> str:
    """Words in a plot."""
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def svg(width: int, height: int, title: str, inside: str) -> str:
    """A plot of its parts."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{inside}</svg>"
    )


def curves(series: Mapping[str, Sequence[float | None]], across: str, title: str) -> str:
    """A line for each of at most six series, values by index on a logarithmic scale, named beside it.

    What is None or not above zero leaves a gap. Nothing where no value is left.
    """
    known = [value for values in series.values() for value in values if value is not None and value > 0]
    if not known:
        return ""
    left, right, top, base = 60, WIDTH - 90, 12, 190
    low = math.floor(math.log10(min(known)))
    high = max(math.ceil(math.log10(max(known))), low + 1)
    count = max(map(len, series.values()))

    def up(value: float) -> float:
        return base - (math.log10(value) - low) / (high - low) * (base - top)

    def right_of(index: int) -> float:
        return left + (index + 0.5) / count * (right - left)

    every = max(1, -(-(high - low) // 6))
    parts = []
    for power in range(low, high + 1, every):
        parts += [axis(left, up(10.0**power), right), text(4, up(10.0**power) + 4, f"{10.0**power:g}")]
    for index in range(0, count, max(1, -(-count // 12))):
        parts.append(text(right_of(index) - 4, base + 16, str(index)))
    parts.append(text(left, base + 32, across))
    for number, (name, values) in enumerate(series.items()):
        points = [(right_of(i), up(v)) for i, v in enumerate(values) if v is not None and v > 0]
        if not points:
            continue
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dots = "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points)
        y = top + 12 + 18 * number
        key = f'<line class="curve" x1="{right + 12}" y1="{y - 4}" x2="{right + 30}" y2="{y - 4}"/>'
        parts.append(f'<g class="series{number}"><polyline class="curve" points="{line}"/>{dots}{key}</g>')
        parts.append(text(right + 35, y, name))
    return svg(WIDTH, base + 40, title, "".join(parts))
