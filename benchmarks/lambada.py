"""What every scheme and method loses on LAMBADA, the last word of passages, beside its source and beside RTN.

    python benchmarks/lambada.py SOURCE QUESTIONS.jsonl NAME=CHECKPOINT... [--limit 500] --out FILE

NAME is a row of `calibration.py`, which says how such a checkpoint is made. The same questions go to the
source and to each checkpoint, as both are served. A row tells how many are answered right, what was lost and
won with the p of McNemar's exact test, and how many nats of log-likelihood the right word lost: a number for
every question, so it tells models apart where too few answers flip. Where the row's scheme has an RTN row
too, questions are paired: Student's t of the difference, and McNemar's p. Rows are added to the document in
FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from calibration import ROWS, RTN

import qinfer
from qinfer import env
from qinfer.evals.paired import mcnemar
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task, load_tasks
from qinfer.evidence import Answerer, TaskStream
from qinfer.reading import OpenModel, Reader, Serving, open_model


def main() -> None:
    options = _options()
    source = open_model(options.source)
    (task,), store = load_tasks([options.questions]), Store(env.results_dir())
    document = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    by_name = {row["name"]: row for row in document["rows"]}
    for name, checkpoint in (argument.split("=", 1) for argument in options.checkpoints):
        if name not in ROWS:
            raise SystemExit(f"{name} is no row of calibration.py: {', '.join(ROWS)}")
        model = open_model(checkpoint)
        sources, found = _answers(source, model, task, store, options.limit)
        if document.setdefault("source", sources) != sources:
            raise SystemExit(f"{options.out} has other answers of the source: name another file")
        by_name[name] = {"name": name, "method": ROWS[name][1], "schemes": sorted(model.schemes()), **found}
        origin = {"processor": env.cpu_name(), "torch": torch.__version__, "qinfer": qinfer.__version__}
        document = {**document, **origin, "rows": list(by_name.values())}
        options.out.write_text(json.dumps(document) + "\n")
    for row in by_name.values():
        print(summary(row, document["source"], by_name.get(RTN[ROWS[row["name"]][0]])))


def _answers(
    source: OpenModel, model: OpenModel, task: Task, store: Store, limit: int | None
) -> list[dict[str, Any]]:
    """Of each model: the log-likelihood of each question's right word, and whether it was the likeliest."""
    answerers = [
        Answerer(Reader(one, Serving.settle("auto", "auto", one.checkpoint), 1), store, progress=True)
        for one in (source, model)
    ]
    stream = TaskStream(answerers[0], answerers[1], [task], 1.0, limit=limit, seed=0)
    stream.extend(stream.size)
    return [
        {
            "nats": [round(pair[i].logliks[0], 4) for pair in stream.pairs],
            "right": [int(bool(pair[i].correct)) for pair in stream.pairs],
        }
        for i in range(2)
    ]


def summary(row: dict[str, Any], source: dict[str, Any], rtn: dict[str, Any] | None) -> str:
    """The row's line; `rtn` is that of its scheme."""
    lost, error, _ = paired(source["nats"], row["nats"])
    line = f"{row['name']:<14}{100 * statistics.mean(row['right']):5.1f} % right"
    line += f" (source {100 * statistics.mean(source['right']):.1f}), {flips(source, row)}"
    line += f", {lost:.4f} +- {error:.4f} nats lost"
    if rtn is not None and rtn is not row:
        won, _, t = paired(row["nats"], rtn["nats"])
        line += f"; beside rtn {won:+.4f} nats, t = {t:.1f}, {flips(rtn, row)}"
    return line


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Mean of one - other, its standard error, and Student's t."""
    gains = [a - b for a, b in zip(one, other, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.mean(gains), error, statistics.mean(gains) / error


def flips(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Answers that became wrong and right, with McNemar's p."""
    pairs = list(zip(before["right"], after["right"], strict=True))
    lost, won = pairs.count((1, 0)), pairs.count((0, 1))
    return f"lost {lost}, won {won}, p = {mcnemar(lost, won):.2g}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the dense model")
    parser.add_argument("questions", help="one set, as `qinfer eval --tasks` takes it")
    parser.add_argument("checkpoints", nargs="*", help="NAME=FOLDER; none: print the table of FILE again")
    parser.add_argument("--limit", type=int, help="only so many questions")
    parser.add_argument("--out", type=Path, required=True, help="JSON document to add rows to")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
