"""What tasks cost: the same questions put to lm-eval's own `hf` model and to qinfer's engine, turn by turn.

    python benchmarks/tasks.py MODEL TASK... [--limit 100] [--dtype float32] [--batch-size 8] [--portion 50]

Tasks are files or names as `qinfer eval --tasks` takes them. Both models have the same weights, dtype and
threads and lie in the same process; portions of a task's questions go to one and then to the other, so that a
machine that others use as well slows both. Loading and the making of prompts are in neither time. Wall
seconds and the process's own, which others disturb less; how many questions were answered otherwise, which in
float32 must be none; the largest difference of two log-likelihoods. One JSON document goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qinfer.env import cpu_name
from qinfer.evals.lm_model import EngineLM
from qinfer.evals.store import Store
from qinfer.evals.tasks_lm_eval import LMEvalTask, load_lm_eval_tasks
from qinfer.evidence import Answerer
from qinfer.reading import Reader, Serving, open_model


class Turns:
    """Two models that are asked the same, with the seconds that each took."""

    def __init__(self, hf: HFLM, engine: EngineLM) -> None:
        self.models = {"hf": hf, "qinfer": engine}
        self.seconds = {name: {"wall": 0.0, "cpu": 0.0} for name in self.models}

    def ask(self, requests: list[Instance]) -> dict[str, list[Any]]:
        """Answers of both; requests are of one kind."""
        answers = {}
        for name, model in self.models.items():
            wall, cpu = time.perf_counter(), time.process_time()
            answers[name] = getattr(model, requests[0].request_type)(requests)
            self.seconds[name]["wall"] += time.perf_counter() - wall
            self.seconds[name]["cpu"] += time.process_time() - cpu
        return answers


def main() -> None:
    options = _options()
    opened = open_model(options.model)
    serving = Serving.settle(options.dtype, "auto", opened.checkpoint)
    hf = HFLM(
        pretrained=str(opened.checkpoint.path),
        dtype=options.dtype,
        batch_size=options.batch_size,
        device="cpu",
    )
    with TemporaryDirectory() as folder:
        scorer = Answerer(Reader(opened, serving, 1), Store(Path(folder)), progress=False).scorer()
        engine = EngineLM(scorer, options.model)
        tasks = [_measure(task, Turns(hf, engine), options) for task in load_lm_eval_tasks(options.tasks)]
    document = {
        "date": date.today().isoformat(),
        "processor": cpu_name(),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "hf_batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lm_eval": version("lm_eval"),
        "tasks": tasks,
    }
    print(json.dumps(document, indent=2))


def _measure(task: LMEvalTask, turns: Turns, options: argparse.Namespace) -> dict[str, Any]:
    task.task.build_all_requests(limit=options.limit)
    questions: dict[int, list[Instance]] = {}
    for instance in task.task.instances:
        questions.setdefault(instance.doc_id, []).append(instance)
    order = list(questions.values())
    differing, largest = 0, 0.0
    for start in range(0, len(order), options.portion):
        portion = order[start : start + options.portion]
        answers = turns.ask([one for instances in portion for one in instances])
        theirs, ours = iter(answers["hf"]), iter(answers["qinfer"])
        for instances in portion:
            pair = [next(theirs) for _ in instances], [next(ours) for _ in instances]
            differing += _decision(pair[0]) != _decision(pair[1])
            largest = max(largest, _distance(*pair))
        print(f"{task.name}: {start + len(portion)} of {len(order)}, {_ratios(turns)}", file=sys.stderr)
    return {
        "task": task.name,
        "questions": len(order),
        "requests": len(task.task.instances),
        "answered_otherwise": differing,
        "largest_difference_nats": largest,
        "seconds": turns.seconds,
        "times_as_fast": _ratios(turns),
    }


def _ratios(turns: Turns) -> dict[str, float]:
    hf, qinfer = turns.seconds["hf"], turns.seconds["qinfer"]
    return {kind: round(hf[kind] / qinfer[kind], 2) for kind in ("wall", "cpu")}


def _decision(answers: Sequence[Any]) -> Any:
    """What a metric makes of a question's answers: the likeliest, whether greedy would say it, the text."""
    if isinstance(answers[0], str):
        return answers[0]
    if not isinstance(answers[0], tuple):
        return None
    logliks = [one[0] for one in answers]
    return logliks.index(max(logliks)), [one[1] for one in answers]


def _distance(first: Sequence[Any], second: Sequence[Any]) -> float:
    if isinstance(first[0], str):
        return 0.0
    ours, theirs = (
        [float(one[0] if isinstance(one, tuple) else one) for one in answers] for answers in (first, second)
    )
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--portion", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
