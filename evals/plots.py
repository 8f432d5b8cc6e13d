"""Small plots as SVG, drawn by hand so that a report is one file: colours and fonts are its style sheet's.

Each has a role and a title for who cannot see it, and no number that is not also in a table nearby.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from qinfer.webpage import WIDTH, axis, svg, text

_LABEL = 27  # height of two lines


class Spot(NamedTuple):
    """One model in a plot of size against quality."""

    name: str
    size: float  # bytes
    quality: float
    low: float
    high: float
    label: str
    best: bool  # nothing else is better in one thing and no worse in the others


def interval(measure: dict[str, Any]) -> str:
    """A measure's interval on a short line, its limit dashed; nothing where a number is missing."""
    value, low, high, limit = (measure[name] for name in ("value", "low", "high", "limit"))
    if None in (value, low, high, limit):
        return ""
    least, most = min(low, limit), max(high, limit)
    margin = (most - least or abs(most) or 1) * 0.15
    start, length = least - margin, most - least + 2 * margin
    x, a, b, edge = (8 + 204 * (number - start) / length for number in (value, low, high, limit))
    title = f"{measure['name']}: {value:.4g}, from {low:.4g} to {high:.4g}; {measure['bound']} {limit:.4g}"
    return svg(
        220,
        22,
        title,
        f'<line class="axis" x1="4" y1="11" x2="216" y2="11"/>'
        f'<line class="limit" x1="{edge:.1f}" y1="2" x2="{edge:.1f}" y2="20"/>'
        f'<line class="span" x1="{a:.1f}" y1="11" x2="{b:.1f}" y2="11"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="11" r="3.5"/>',
    )


def bars(names: Sequence[str], values: Sequence[float | None], worst: str | None, title: str) -> str:
    """A bar for each value; what has none is as high as the plot."""
    height, base, left = 170, 140, 48
    known = [value for value in values if value is not None]
    top = max(known, default=1.0) or 1.0
    step = (WIDTH - left - 8) / max(len(values), 1)
    parts = [text(4, 18, f"{top:.3g}"), text(4, base, "0"), axis(left, base)]
    every = max(1, math.ceil(len(names) / 12))
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        tall = (base - 14) * (1.0 if value is None else value / top)
        kind = "bar worst" if name == worst else "bar"
        x = left + i * step
        parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{base - tall:.1f}" width="{step * 0.8:.1f}" '
            f'height="{tall:.1f}"/>'
        )
        if i % every == 0 or name == worst:
            parts.append(text(x, base + 14 + 12 * (name == worst), name))
    return svg(WIDTH, height, title, "".join(parts))


def quantiles(values: Sequence[Sequence[float]], title: str) -> str:
    """A curve through (share, value) points, values on a logarithmic scale."""
    points = [(share, value) for share, value in values if value > 0]
    if len(points) < 2:
        return ""
    left, right, top, base = 60, WIDTH - 28, 12, 170
    low = math.floor(math.log10(min(value for _, value in points)))
    high = math.ceil(math.log10(max(value for _, value in points)))
    high = max(high, low + 1)

    def place(share: float, value: float) -> tuple[float, float]:
        up = (math.log10(value) - low) / (high - low)
        return left + share * (right - left), base - up * (base - top)

    parts = [axis(left, base)]
    for power in range(low, high + 1):
        y = place(0, 10.0**power)[1]
        parts.append(f'<line class="axis" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(text(4, y + 4, f"{10.0**power:g}"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(text(place(share, 10.0**low)[0] - 10, base + 16, f"{share:.0%}"))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    return svg(WIDTH, 192, title, "".join(parts) + f'<polyline class="curve" points="{line}"/>')


def pareto(spots: Sequence[Spot], quality: str, title: str) -> str:
    """Size to the right, quality with its interval upwards; those that nothing beats are joined by a line."""
    left, right, top, base = 60, WIDTH - 170, 24, 270
    sizes = [spot.size for spot in spots]
    x_low, x_high = min(sizes) * 0.9, max(sizes) * 1.1
    y_low, y_high = min(spot.low for spot in spots), max(spot.high for spot in spots)
    pad = (y_high - y_low or 0.01) * 0.1
    y_low, y_high = y_low - pad, y_high + pad

    def across(size: float) -> float:
        return left + (size - x_low) / (x_high - x_low) * (right - left)

    def up(value: float) -> float:
        return base - (value - y_low) / (y_high - y_low) * (base - top)

    parts = [
        axis(left, base, right),
        f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{base}"/>',
        text(4, 14, quality),
        text(4, top + 8, f"{y_high:.4g}"),
        text(4, base, f"{y_low:.4g}"),
        text(left, base + 18, f"{x_low / 1e6:.4g} MB"),
        text(right - 60, base + 18, f"{x_high / 1e6:.4g} MB"),
    ]
    front = sorted((across(spot.size), up(spot.quality)) for spot in spots if spot.best)
    parts.append(f'<polyline class="front" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in front)}"/>')
    beside = float(top - _LABEL)  # where the label before ended
    for spot in sorted(spots, key=lambda spot: -spot.quality):
        x, y = across(spot.size), up(spot.quality)
        beside = max(y, beside + _LABEL)
        kind = "good" if spot.best else "quiet"
        parts.append(
            f'<g class="{kind}"><line class="span" x1="{x:.1f}" y1="{up(spot.low):.1f}" x2="{x:.1f}" '
            f'y2="{up(spot.high):.1f}"/><circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/></g>'
            f'<line class="axis" x1="{x + 6:.1f}" y1="{y:.1f}" x2="{x + 16:.1f}" y2="{beside:.1f}"/>'
        )
        name = spot.name.rstrip("/").rsplit("/", 1)[-1]
        parts.append(text(x + 19, beside, name[:26]) + text(x + 19, beside + 12, spot.label))
    return svg(WIDTH, 300, title, "".join(parts))
