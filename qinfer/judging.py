"""What `qinfer eval` does beside one verdict: candidates to choose from, one model on tasks or a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from tqdm import tqdm

import qinfer
from qinfer import jobs, reading
from qinfer.alone import TaskScores, ask_alone
from qinfer.choice import Choice, choose
from qinfer.compare import Questions, opened_store
from qinfer.dtypes import name_of
from qinfer.errors import UserError, check_counts, check_flags, check_seed
from qinfer.evals import perplexity, report_choice, text


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


def score_text(
    model: str,
    text_file: str | Path,
    *,
    windows: int | None = None,
    window: int = 1024,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    lm_head_dtype: str = "auto",
    seed: int = 0,
    revision: str | None = None,
    hf_token: str | None = None,
    progress: bool = True,
) -> perplexity.TextScore:
    """Perplexity of one model on a UTF-8 text, in its first `windows` windows (None: all) of `window` tokens.

    Raises UserError for a window below 2, and a text that cannot be read or is too short to score.
    """
    check_counts(windows=windows, window=window)
    check_seed(seed)
    if window < 2:
        raise UserError(f"window is {window}: at least 2 tokens are needed to score one", "window")
    opened = reading.open_model(model, revision=revision, token=hf_token)
    serving = reading.Serving.settle(dtype, kv_cache_dtype, opened.checkpoint, lm_head_dtype)
    window = min(window, opened.checkpoint.config.context_len)
    cut = list(text.text_windows(opened.tokenizer, reading.read_text(Path(text_file)), window))[:windows]
    if not cut:
        raise UserError(f"{text_file} holds no text to score: at least two tokens are needed", "text")
    ids = [w.token_ids for w in cut]
    nlls = perplexity.likelihoods(reading.Reader(opened, serving, window).logits, ids)
    settings = {
        "model": model,
        "text": str(text_file),
        "windows": len(cut),
        "window": window,
        "stride": window,
        "data_sha256": text.data_hash(cut),
        "dtype": name_of(serving.dtype),
        "kv_cache_dtype": serving.kv_cache_dtype,
        "lm_head_dtype": serving.lm_head_dtype,
        "qinfer": qinfer.__version__,
    }
    return perplexity.score_text(
        list(tqdm(nlls, total=len(ids), desc="perplexity", unit="window", disable=not progress)),
        "".join(opened.tokenizer.decode(w[1:], skip_special_tokens=False) for w in ids),
        settings,
        seed=seed,
    )
