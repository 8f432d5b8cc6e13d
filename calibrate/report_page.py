"""The quantize report for people: one page of HTML that needs nothing beside it, and the same as Markdown.

Settings and data, then layer by layer how far each group's output moved, what its weights and inputs look
like, and plots of what matters: errors, sensitivity, outliers of the inputs. The numbers of every plot are in
the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from qinfer.calibrate.report import LayerReport, QuantizeReport
from qinfer.webpage import curves, page, table

PAGE_NAME, MARKDOWN_NAME = "qinfer_report.html", "qinfer_report.md"
GROUPS = ("qkv", "o", "gate_up", "down")
_COLUMNS = (
    *("layer", "group", "scheme", "output error", "SQNR dB", "weight error"),
    *("largest input", "outliers", "weights clipped", "inputs clipped", "range used", "note"),
)
_TOLD = (  # of the settings, in this order; others are in the JSON
    ("source", "model"),
    ("read as", "read as"),
    ("activations", "activations while calibrating"),
    ("seed", "seed"),
    ("qinfer", "qinfer"),
    ("torch", "torch"),
)


def markdown(report: QuantizeReport) -> str:
    """The report as Markdown."""
    lines = [f"# {report.scheme} by {report.method}", ""]
    lines += [f"* {name}: {value}" for name, value in _settings(report)]
    lines += [f"* checked: {check}" for check in report.health]
    lines += ["", "| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(report)]
    return "\n".join(lines) + "\n"


def html(report: QuantizeReport) -> str:
    """The report as one page."""
    title = f"{report.scheme} by {report.method}"
    model = str(report.settings.get("source", "")).rstrip("/").rsplit("/", 1)[-1]
    settings = [(escape(name), escape(value)) for name, value in _settings(report)]
    checks = "".join(f'<li><span class="good">✓</span> {escape(check)}</li>' for check in report.health)
    parts = [
        f"<h1>{escape(model)}: {escape(title)}</h1>",
        f"<p>{escape(_sizes(report))}, {escape(report.to_pace())}; {report.average_bits:.2f} bits per weight "
        "of the linears, scales counted.</p>",
        *_figures(report),
        "<h2>Layer by layer</h2>",
        '<p class="quiet">Errors are relative, on calibration inputs; SQNR is of the output; outliers are '
        "the largest channel's magnitude over the median channel's; clipped is the share of numbers beyond "
        "their range. Inputs whose scale is made anew for every token are never clipped; where it is static, "
        "the range used is what all but one in 10,000 need of it.</p>",
        _layers_table(report),
        f"<h2>Checked before the files appeared</h2><ul>{checks}</ul>",
        f"<h2>To get the same files</h2>{table(('setting', ''), settings)}",
    ]
    return page(f"{model}: {title}", "\n".join(parts))


def _layers_table(report: QuantizeReport) -> str:
    """All groups of all layers; columns in which nobody has a number, or a note, are left out."""
    rows = _rows(report)
    told = [i for i in range(len(_COLUMNS)) if any(row[i] not in ("-", "") for row in rows)]
    cells = [[escape(row[i]) for i in told] for row in rows]
    return table([_COLUMNS[i] for i in told], cells, [told.index(i) for i in told if 3 <= i < 11])


def _settings(report: QuantizeReport) -> list[tuple[str, str]]:
    found = [(name, str(report.settings[key])) for key, name in _TOLD if key in report.settings]
    found += [
        ("time", report.to_pace()),
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
            ("seed of the text", str(data["seed"])),
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
        layer.input_clipped.get(group),
        layer.range_used.get(group),
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
        f"<h2>{escape(title)}</h2><figure>{curves(series, 'layer', caption)}<figcaption>{escape(caption)}; "
        "the scale is logarithmic</figcaption></figure>"
        for title, caption, series in plots
        if any(value for values in series.values() for value in values)
    ]


def _worst(values: Mapping[str, float], group: str) -> float | None:
    """The value of a group; of a group of each expert the largest."""
    return max(
        (v for name, v in values.items() if name == group or name.startswith(f"{group}.")), default=None
    )
