"""What the gate's limits are derived from: measures of checkpoints that must pass and of some that must fail.

    python benchmarks/thresholds.py SOURCE CHECKPOINT... [--text FILE] [--windows 12] --out FILE

Each checkpoint and, first of all, the source as it is served are compared with the source in float32, as the
gate does it, on the held-out text that comes with Python or on a text of yours. Rows are added to the JSON
document in FILE after each checkpoint; a row of the same model, text and checkpoint is replaced. What was
read before is not read again. `docs/thresholds.md` says what follows from the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import qinfer
from qinfer import env
from qinfer.evals import fidelity, text
from qinfer.evals.store import Store
from qinfer.evals.thresholds import Limits
from qinfer.reading import Bar, OpenModel, Reader, Serving, open_model, read_text, scores_of

MEASURES = ("mean KL", "p99 KL", "top-1 agreement", "perplexity ratio")
_NO_LIMITS = Limits(*(1.0 for _ in Limits._fields))


def main() -> None:
    options = _options()
    source = open_model(options.source)
    cut = (
        text.text_windows(source.tokenizer, read_text(options.text), options.window)
        if options.text
        else text.reference_windows(source.tokenizer, options.window)
    )
    windows = [window.token_ids for window in cut][: options.windows]
    store = Store(env.results_dir())
    reference = Reader(source, Serving.settle("float32", "auto", source.checkpoint), options.window, store)
    for model in (source, *map(open_model, options.checkpoints)):
        serving = Serving.settle("auto", "auto", model.checkpoint)
        reader = Reader(model, serving, options.window)
        scores = scores_of(reference, reader, windows, store, Bar(True))
        row = {
            "model": Path(options.source).stem,
            "text": "built-in" if options.text is None else options.text.stem,
            "checkpoint": "source" if model is source else Path(model.name).name,
            "schemes": sorted(model.schemes()),
            "windows": len(windows),
            "tokens": sum(map(len, windows)),
            **_measured(scores),
        }
        _keep(options.out, row, source)
        print(_line(row), file=sys.stderr, flush=True)


def _measured(scores: list[fidelity.WindowScores]) -> dict[str, list[float]]:
    """[value, low, high] by the measure's name."""
    found = fidelity.measures(scores, _NO_LIMITS)
    return {m.name: [float(f"{n:.5g}") for n in m.interval] for m in found if m.name in MEASURES}


def _keep(out: Path, row: dict[str, Any], source: OpenModel) -> None:
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    same = ("model", "text", "checkpoint")
    rows = [old for old in document["rows"] if [old[key] for key in same] != [row[key] for key in same]]
    origin = {"cpu": env.cpu_name(), "torch": torch.__version__, "qinfer": qinfer.__version__}
    parameters = {**document.get("parameters", {}), row["model"]: source.num_parameters}
    document = {**origin, "parameters": parameters, "rows": [*rows, row]}
    out.write_text(json.dumps(document, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    numbers = "  ".join(
        f"{name} {row[name][0]:.4g} [{row[name][1]:.4g}, {row[name][2]:.4g}]" for name in MEASURES
    )
    return f"{row['model']} {row['text']} {row['checkpoint']}: {numbers}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the dense model")
    parser.add_argument("checkpoints", nargs="*", help="made from it")
    parser.add_argument("--text", type=Path, help="UTF-8 text instead of the built-in one")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--window", type=int, default=512, help="tokens of each")
    parser.add_argument("--out", type=Path, required=True, help="JSON document to add rows to")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
