"""The quantize report for people: one page of HTML that needs nothing beside it, and the same as Markdown.

Settings and data, then layer by layer how far each group's output moved, what its weights and inputs look
like, and plots of what matters: errors, sensitivity, outliers of the inputs. The numbers of every plot are in
the table. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from qinfer.calibrate.report import LayerReport, QuantizeReport

PAGE_NAME, MARKDOWN_NAME = "qinfer_report.html", "qinfer_report.md"
GROUPS = ("qkv", "o", "gate_up", "down")
_COLUMNS = (
    *("layer", "group", "scheme", "output error", "SQNR dB", "weight error"),
    *("largest input", "outliers", "clipped", "note"),
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --quiet: #59616c; --paper: #fff; --line: #d5d9e0;
  --qkv: #2b6cd4; --o: #b3541e; --gate_up: #2e7d4f; --down: #8a3fb8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ec; --quiet: #a3acb8; --paper: #15171b;
  --line: #3a404a; --qkv: #7fb0ff; --o: #f0a36c; --gate_up: #6fd39a; --down: #cf97f3; } }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem 3rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
.quiet, caption, figcaption { color: var(--quiet); font-size: .9rem; text-align: left; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th, td { white-space: nowrap; }
th:nth-child(-n+3), td:nth-child(-n+3), td:last-child, dl { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 .3rem 0; overflow-wrap: anywhere; }
figure { margin: .8rem 0; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .axis { stroke: var(--line); }
@media print { :root { color-scheme: light; --ink: #000; --paper: #fff; --quiet: #444; }
  tr, figure { break-inside: avoid; } }
"""


def markdown(report: QuantizeReport) -> str:
    """The report as Markdown."""
    lines = [f"# {report.scheme} by {report.method}", ""]
    lines += [f"* {name}: {value}" for name, value in _settings(report)]
    lines += ["", "| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(report)]
    return "\n".join(lines) + "\n"


def html(report: QuantizeReport) -> str:
    """The report as one page."""
    title = escape(f"{report.scheme} by {report.method}")
    settings = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in _settings(report))
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in _COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in _rows(report))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1><dl>{settings}</dl>"
        f"{''.join(_figures(report))}<h2>Layer by layer</h2>"
        '<div class="scroll" tabindex="0"><table><caption>Errors are relative, on calibration inputs; '
        "outliers are the largest channel's magnitude over the median's; clipped is the share of weights "
        f"beyond their range.</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        "</main></body></html>\n"
    )


def _settings(report: QuantizeReport) -> list[tuple[str, str]]:
    found = [
        ("time", f"{report.seconds:.1f} s"),
        ("average", f"{report.average_bits:.2f} bits per weight of the linears, scales counted"),
        ("size", _sizes(report)),
        ("ranges", report.ranges),
        ("KV scales", report.kv_scales or "none"),
        ("each layer was calibrated on", report.propagated),
    ]
    if report.calibration is not None:
        data = report.calibration
        found += [
            ("text", f"{data['source']}: {data['num_sequences']} sequences, {data['num_tokens']} tokens"),
            ("seed", str(data["seed"])),
            ("sha256 of the token ids", str(data["sha256"])),
        ]
    found += [("note", note) for note in report.notes]
    if report.mix:
        found.append(("raised", ", ".join(f"{unit} to {label}" for unit, label in report.mix.items())))
    return found


def _sizes(report: QuantizeReport) -> str:
    before, after = report.bytes_before, report.bytes_after
    return (
        f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after, {after / before:.1%}"
        if before
        else "-"
    )


def _rows(report: QuantizeReport) -> list[list[str]]:
    return [
        [str(layer.index), group, report.mix.get(f"layer {layer.index} {group}", report.scheme)]
        + [_number(value) for value in _values(layer, group)]
        + [layer.notes.get(group, "")]
        for layer in report.layers
        for group in layer.groups
    ]


def _values(layer: LayerReport, group: str) -> list[float | None]:
    modules = layer.groups.get(group, ())
    weights = [layer.weight_errors[m] for m in modules if m in layer.weight_errors]
    clipped = [layer.clipped[m] for m in modules if m in layer.clipped]
    error = layer.output_errors.get(group)
    return [
        error,
        -20 * math.log10(error) if error else None,
        sum(weights) / len(weights) if weights else None,
        layer.input_absmax.get(group),
        layer.outliers.get(group),
        sum(clipped) / len(clipped) if clipped else None,
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _figures(report: QuantizeReport) -> list[str]:
    layers = {layer.index: layer for layer in report.layers}
    errors = {g: [_worst(layers[i].output_errors, g) for i in layers] for g in GROUPS}
    outliers = {g: [_worst(layers[i].outliers, g) for i in layers] for g in GROUPS}
    costs = {g: [_worst(report.sensitivity, f"layer {i} {g}") for i in layers] for g in GROUPS}
    plots: list[tuple[str, str, Mapping[str, list[float | None]]]] = [
        ("Errors of outputs", "relative error of each group's output, by layer", errors),
        ("Sensitivity", "KL in nats when only that group of that layer is quantized, by layer", costs),
        ("Outliers", "largest channel of a group's input over the median channel, by layer", outliers),
    ]
    return [
        f"<h2>{escape(title)}</h2><figure>{_plot(series, caption)}<figcaption>{escape(caption)}; "
        "the scale is logarithmic</figcaption></figure>"
        for title, caption, series in plots
        if any(value for values in series.values() for value in values)
    ]


def _worst(values: Mapping[str, float], group: str) -> float | None:
    """The value of a group; of a group of each expert the largest."""
    return max(
        (v for name, v in values.items() if name == group or name.startswith(f"{group}.")), default=None
    )


def _plot(series: Mapping[str, Sequence[float | None]], title: str) -> str:
    """A line for each group, on a logarithmic scale."""
    known = [value for values in series.values() for value in values if value]
    low, high = math.log10(min(known)), math.log10(max(known))
    span, width, height = max(high - low, 0.1), 880, 240
    count = max(map(len, series.values()))

    def place(i: int, value: float) -> str:
        x = 70 + i * (width - 160) / max(1, count - 1)
        return f"{x:.1f},{height - 30 - (math.log10(value) - low) / span * (height - 60):.1f}"

    parts: list[Any] = [
        f'<line class="axis" x1="70" y1="{height - 30}" x2="{width - 90}" y2="{height - 30}"/>',
        f'<text x="4" y="{height - 26}">{10**low:.3g}</text><text x="4" y="34">{10**high:.3g}</text>',
        f'<text x="66" y="{height - 10}">0</text>',
        f'<text x="{width - 100}" y="{height - 10}">{count - 1}</text>',
    ]
    for n, (group, values) in enumerate(series.items()):
        points = " ".join(place(i, value) for i, value in enumerate(values) if value)
        line = f'points="{points}" fill="none" stroke="var(--{group})" stroke-width="2"'
        parts.append(f'<polyline {line} stroke-dasharray="{("1 0", "6 3", "2 2", "8 2 2 2")[n]}"/>')
        key = f'x="{width - 78}" y="{40 + 22 * n}" style="fill: var(--{group})"'
        parts.append(f"<text {key}>{escape(group)}</text>")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
