"""What sound and unsound checkpoints lose on tasks, from which the gate's limit of recovery is derived.

    python benchmarks/recovery.py SOURCE CHECKPOINT... [--tasks builtin] [--limit 100] --out FILE

The same questions go to the source and to each checkpoint, both as they are served, as the gate puts them. A
row is one checkpoint on one set of tasks: recovery over all tasks on which the source is better than chance,
with its interval, the share of flips, and each task's accuracies. Rows are added to the JSON document in FILE
after each checkpoint; one of the same model, tasks and checkpoint is replaced. `docs/thresholds.md` says what
follows from the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import qinfer
from qinfer import env
from qinfer.evals.paired import pool
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task, load_tasks
from qinfer.evidence import Answerer, TaskStream
from qinfer.reading import OpenModel, Reader, Serving, open_model


def main() -> None:
    options = _options()
    source = open_model(options.source)
    names = options.tasks.split(",")
    tasks, store = load_tasks(names), Store(env.results_dir())
    for model in map(open_model, options.checkpoints):
        start = time.monotonic()
        stream = TaskStream(
            _answerer(source, store), _answerer(model, store), tasks, 1.0, limit=options.limit, seed=0
        )
        stream.extend(stream.size)
        row = {
            "model": Path(options.source).stem,
            "tasks": [Path(name).stem for name in names],
            "checkpoint": Path(model.name).name,
            "schemes": sorted(model.schemes()),
            **_measured(stream, tasks),
        }
        _keep(options.out, row)
        line = f"{row['model']} {row['checkpoint']}: recovery {row['recovery']}, flips {row['flips']}, "
        print(f"{line}{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _answerer(model: OpenModel, store: Store) -> Answerer:
    serving = Serving.settle("auto", "auto", model.checkpoint)
    return Answerer(Reader(model, serving, 1), store, progress=True)


def _measured(stream: TaskStream, tasks: list[Task]) -> dict[str, Any]:
    """Over all tasks, over those with choices and those without, and task by task."""
    found: dict[str, Any] = {"questions": len(stream.pairs)}
    for name, kinds in (
        ("recovery", {task.kind for task in tasks}),
        ("recovery of choices", {"choice", "loglikelihood"}),
        ("recovery of free answers", {"generation"}),
    ):
        pooled = pool([pair for pair in stream.pairs if pair[0].kind in kinds])
        if pooled is not None:
            found[name] = [float(f"{n:.4g}") for n in pooled.recovery]
            found.setdefault("flips", float(f"{pooled.flips.value:.4g}"))
    columns = ("task", "items", "chance", "source", "candidate", "lost", "won", "counts")
    found["by_task"] = [{name: getattr(one, name) for name in columns} for one in stream.results()]
    return found


def _keep(out: Path, row: dict[str, Any]) -> None:
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    same = ("model", "tasks", "checkpoint")
    rows = [old for old in document["rows"] if [old[key] for key in same] != [row[key] for key in same]]
    origin = {"cpu": env.cpu_name(), "torch": torch.__version__, "qinfer": qinfer.__version__}
    out.write_text(json.dumps({**origin, "rows": [*rows, row]}, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the dense model")
    parser.add_argument("checkpoints", nargs="+", help="made from it")
    parser.add_argument("--tasks", default="builtin", help="as `qinfer eval --tasks` takes them")
    parser.add_argument("--limit", type=int, help="questions of each task")
    parser.add_argument("--out", type=Path, required=True, help="JSON document to add rows to")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
