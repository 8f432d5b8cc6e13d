"""`qinfer inspect`: what a checkpoint folder holds, and what the gate said of it."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.gate import told
from qinfer.cli.options import JsonOption
from qinfer.cli.output import show, stdout_kept_for_result, table

if TYPE_CHECKING:
    from qinfer.checkpoint.checkpoint import Checkpoint


def inspect(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint folder.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Show schemes, sizes, tensors and the gate's verdict of a checkpoint folder."""
    with stdout_kept_for_result():
        from qinfer.checkpoint.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(directory)
        document = {
            "path": str(directory),
            "architecture": checkpoint.config.architecture,
            "dtype": checkpoint.config.dtype,
            "num_layers": checkpoint.config.num_layers,
            "num_bytes": checkpoint.num_bytes,
            "num_tensors": len(checkpoint.names()),
            "is_quantized": checkpoint.is_quantized,
            "dialect": checkpoint.quantization.method if checkpoint.is_quantized else None,
            "kv_cache_scheme": checkpoint.quantization.kv_cache_scheme,
            "groups": _groups(checkpoint),
            "gate": _gate(checkpoint),
        }
    show(document, _text(document), as_json)


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Per group of linears and scheme: how many modules, their weights and bytes; last, all other tensors."""
    from qinfer.checkpoint.names import layer_groups, layer_prefix, linear_shape

    config = checkpoint.config
    sums: dict[tuple[str, str], Counter[str]] = {}
    seen = 0
    for i in range(config.num_layers):
        for group in layer_groups(config):
            for module in group.modules:
                name = layer_prefix(config, i) + module
                scheme, shape = checkpoint.scheme(name), linear_shape(config, module)
                num_bytes = sum(
                    checkpoint.tensor_bytes(f"{name}.{suffix}") for suffix in checkpoint.module_specs(name)
                )
                seen += num_bytes
                row = sums.setdefault((group.name, scheme.label), Counter())
                row.update(num_modules=1, num_weights=prod(shape), num_bytes=num_bytes)
    rest = sum(checkpoint.tensor_bytes(name) for name in checkpoint.names()) - seen
    rows: list[dict[str, Any]] = [
        {"group": group, "scheme": scheme, **sums[group, scheme]} for group, scheme in sums
    ]
    other = {"group": "embeddings, norms, biases, head", "scheme": "dense", "num_bytes": rest}
    return [*rows, other]


def _gate(checkpoint: Checkpoint) -> dict[str, Any]:
    """Whether it would be served now, and the verdict with its reasons and measures where there is one."""
    found = told(checkpoint.path, is_quantized=checkpoint.is_quantized)
    written = found.pop("certificate")
    return {**found, **{key: written.get(key) for key in ("verdict", "reasons", "measures")}}


def _text(document: dict[str, Any]) -> str:
    from qinfer.engine.footprint import format_size

    rows = [
        (
            row["group"],
            row["scheme"],
            str(row.get("num_modules", "")),
            format_size(row["num_bytes"]),
            f"{8 * row['num_bytes'] / row['num_weights']:.2f}" if "num_weights" in row else "",
        )
        for row in document["groups"]
    ]
    gate = document["gate"]
    lines = [
        f"{document['path']}: {document['architecture']}, {document['num_layers']} layers, "
        f"{document['dtype']}, {document['num_tensors']} tensors, {format_size(document['num_bytes'])}"
        + (f", in the dialect of {document['dialect']}" if document["dialect"] else ""),
        "",
        table(("group", "scheme", "linears", "size", "bits per weight"), rows),
        "",
        f"gate: {gate['verdict']}" if gate["state"] == "passed" else gate["line"],
        *(f"  {reason}" for reason in gate["reasons"] or ()),
    ]
    return "\n".join(lines)
