"""`qinfer eval`: the gate's verdict on checkpoints, measured against their source; or one model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qinfer.cli.options import (
    DtypeOption,
    HubTokenOption,
    JsonOption,
    KVCacheDtypeOption,
    LMHeadDtypeOption,
    ProfileOption,
    RevisionOption,
    SignOption,
    ValidDaysOption,
)
from qinfer.cli.output import show, stdout_kept_for_result
from qinfer.errors import UserError


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Checkpoint folders, hub ids, .gguf files, or the built-in smollm2-135m-instruct. Several: "
            "to choose between, with --against.",
            show_default=False,
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="REF", help="The dense source to compare with.", show_default=False),
    ] = None,
    profile: ProfileOption = "standard",
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to judge on. Default: reference text kept for it."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Questions too: builtin (made by rule), names of lm-eval, FILE.yaml, FILE.jsonl, or none. "
            "Default: builtin with the profile strict, else none.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put questions through the chat template.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Such as 90s or 10m, spent where it decides most. Default: all that the profile wants.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a report: FILE with .html, .md and .json."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew, and keep nothing of it in the cache.")
    ] = False,
    perplexity: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="No verdict: the perplexity of MODEL alone on this text."),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Only so many windows of it (with --perplexity).")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of each (with --perplexity).")] = 1024,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    lm_head_dtype: LMHeadDtypeOption = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    sign: SignOption = None,
    valid_days: ValidDaysOption = None,
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge MODEL against its source: exit code 1 unless it passes; unless all pass, if there are several.

    The verdict of a quantized checkpoint is written beside it as JSON, Markdown and HTML. Without --against,
    --tasks gives the results of one model alone, as lm-eval does. What was measured is kept in the cache
    folder: the source is measured once, and a run that was stopped goes on where it was.
    """
    _check(models, against, perplexity, tasks)
    common: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    common |= {"lm_head_dtype": lm_head_dtype, "revision": revision, "hf_token": hf_token}
    named = None if tasks is None else [name for name in tasks.split(",") if name not in ("", "none")]
    asked: dict[str, Any] = {"tasks": named, "chat": chat}
    asked |= {"limit": limit, "num_fewshot": num_fewshot, "keep": not fresh}
    verdict: str | None = None
    with stdout_kept_for_result():
        from qinfer import jobs, judging

        result: Any
        if perplexity is not None:
            of_text: dict[str, Any] = {"windows": windows, "window": window, "seed": seed}
            result = judging.score_text(models[0], perplexity, **of_text, **common)
        elif against is None:
            result = judging.ask_tasks(models[0], **asked, **common)
        else:
            judged: dict[str, Any] = {"profile": profile, "text_file": text, "budget": budget, "seed": seed}
            judged |= {"sign": sign, "valid_days": valid_days, "against": against, "report_file": report}
            if len(models) == 1:
                result = jobs.evaluate(models[0], **judged, **asked, **common)
            else:
                result = judging.choose_between(models, **judged, **asked, **common)
            verdict = result.verdict
    show(result.to_dict(), result.to_text(), as_json)
    if verdict is not None and verdict != "PASS":
        raise typer.Exit(1)


def _check(models: list[str], against: str | None, perplexity: Path | None, tasks: str | None) -> None:
    """UserError for options that do not go together."""
    if against is None and len(models) > 1:
        raise UserError("several models are compared with their source: give --against REF", "against")
    if against is None and perplexity is None and tasks is None:
        raise UserError(
            "give --against REF for a verdict, --tasks for results of MODEL alone, or --perplexity FILE for "
            "a number",
            "against",
        )
    if perplexity is not None and (against is not None or tasks is not None):
        raise UserError(
            "--perplexity is of one model alone: leave out --against REF and --tasks", "perplexity"
        )
