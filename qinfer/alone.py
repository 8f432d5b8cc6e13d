"""One model on tasks, compared with nothing: lm-eval's own results, through qinfer's engine.

lm-eval's tasks are put by lm-eval itself, so that its numbers, names and standard errors are what it reports
for this model; the tasks made by rule are counted here, in the same form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import qinfer
from qinfer.compare import Questions
from qinfer.evals.items import Item
from qinfer.evals.scorer import Scorer
from qinfer.evals.statistics import finite
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task
from qinfer.evals.tasks_by_rule import RuleTask
from qinfer.evidence import Answerer, blocks_of
from qinfer.reading import OpenModel, Reader, Serving


class Score(NamedTuple):
    """One metric of one task; `error` is its standard error, None where there is none."""

    task: str
    items: int
    shots: int
    metric: str
    value: float
    error: float | None


class TaskScores(NamedTuple):
    """All metrics of all tasks, and what it takes to get them again."""

    scores: tuple[Score, ...]
    settings: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        scores = [
            {**score._asdict(), "value": finite(score.value), "error": score.error} for score in self.scores
        ]
        return {"scores": scores, "settings": dict(self.settings)}

    def to_text(self) -> str:
        """For a terminal: one line a metric."""
        rows = [
            (
                score.task,
                str(score.items),
                str(score.shots),
                score.metric,
                _number(score.value),
                _error(score),
            )
            for score in self.scores
        ]
        header = ("task", "items", "shots", "metric", "value", "")
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (header, *rows)
        )


def _number(value: float) -> str:
    return f"{value:.4f}"


def _error(score: Score) -> str:
    return "" if score.error is None else f"± {score.error:.4f}"


def ask_alone(
    model: OpenModel, serving: Serving, questions: Questions, store: Store, *, progress: bool
) -> TaskScores:
    """Puts the tasks to one model; raises UserError where a task cannot be had or put."""
    tasks = questions.load()
    answerer = Answerer(Reader(model, serving, 1), store, progress=progress)
    by_rule = [task for task in tasks if isinstance(task, RuleTask)]
    others = [task for task in tasks if not isinstance(task, RuleTask)]
    found = _counted(answerer, by_rule, questions.limit)
    if others:
        found += _by_lm_eval(answerer.scorer(), model.name, others, questions)
    settings = {
        "model": model.name,
        "tasks": list(questions.tasks),
        "limit": questions.limit,
        "num_fewshot": questions.num_fewshot,
        "chat": questions.chat,
        **serving.to_dict(),
        "qinfer": qinfer.__version__,
    }
    return TaskScores(tuple(found), settings)


def _counted(answerer: Answerer, tasks: Sequence[Task], limit: int | None) -> list[Score]:
    by_task: dict[str, list[Item]] = {task.name: [] for task in tasks}
    for item in answerer.answers(blocks_of(tasks, limit)):
        by_task[item.task].append(item)
    return [
        _score(name, items, metric) for name, items in by_task.items() for metric in items[0].scores if items
    ]


def _score(task: str, items: Sequence[Item], metric: str) -> Score:
    """Mean and its standard error, sample deviation / sqrt(n), as lm-eval has it."""
    values = [item.scores[metric] for item in items]
    n = len(values)
    mean = math.fsum(values) / n
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n) if n > 1 else None
    return Score(task, n, 0, metric, mean, error)


def _by_lm_eval(scorer: Scorer, name: str, tasks: Sequence[Task], questions: Questions) -> list[Score]:
    from qinfer.evals.lm_model import EngineLM
    from qinfer.evals.tasks_lm_eval import LMEvalTask, lm_eval_results

    of_lm_eval = [task for task in tasks if isinstance(task, LMEvalTask)]
    lm = EngineLM(scorer, name)
    results = lm_eval_results(lm, of_lm_eval, limit=questions.limit, chat=questions.chat)
    found = []
    for task in of_lm_eval:
        of_task = results["results"][task.name]
        items, shots = results["n-samples"][task.name]["effective"], results["n-shot"].get(task.name, 0)
        for key, value in of_task.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = of_task.get(f"{metric}_stderr,{filtered}")
            told = metric if filtered == "none" else f"{metric},{filtered}"
            settled = float(error) if isinstance(error, int | float) else None
            found.append(Score(task.name, items, shots, told, float(value), settled))
    return found
