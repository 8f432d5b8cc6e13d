"""What `qinfer eval` does beside one verdict: several candidates to choose from, one model alone on tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from qinfer import jobs, reading
from qinfer.alone import TaskScores, ask_alone
from qinfer.choice import Choice, choose
from qinfer.compare import Questions, opened_store
from qinfer.errors import UserError, check_flags
from qinfer.evals import report_choice


def choose_between(
    models: Sequence[str],
    *,
    against: str,
    report_file: str | Path | None = None,
    **options: Unpack[jobs.Options],
) -> Choice:
    """Judges each model against the same dense source, as `jobs.evaluate` with `options`, and times them.

    Each quantized one gets its certificate; `report_file` is written with .html, .md and .json.
    Raises UserError for less than two models, for one that is named twice, and as `jobs.evaluate` does.
    """
    if len(models) < 2 or len(set(models)) < len(models):
        raise UserError("give two or more different models to choose from", "model")
    orders = [jobs.prepare(model, against=against, **options) for model in models]
    results = [order.carry_out() for order in orders]
    choice = choose([order.comparison for order in orders], results)
    if report_file is not None:
        report_choice.write(Path(report_file), choice.to_dict())
    return choice


def ask_tasks(
    model: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    keep: bool = True,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    lm_head_dtype: str = "auto",
    revision: str | None = None,
    hf_token: str | None = None,
    progress: bool = True,
) -> TaskScores:
    """Results of one model on tasks: lm-eval's own for its tasks, counted for those made by rule.

    Raises UserError for a task that cannot be had or put, and for an unknown option.
    """
    check_flags(chat=chat, keep=keep)
    questions = Questions.chosen(tasks, "standard", limit, num_fewshot, chat)
    if questions is None:
        raise UserError("name the tasks to ask", "tasks")
    opened = reading.open_model(model, revision=revision, token=hf_token)
    serving = reading.Serving.settle(dtype, kv_cache_dtype, opened.checkpoint, lm_head_dtype)
    with opened_store(keep=keep) as store:
        return ask_alone(opened, serving, questions, store, progress=progress)
