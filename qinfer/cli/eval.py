"""`qinfer eval`: the gate's verdict on a checkpoint, measured against its source."""

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
    ModelArgument,
    ProfileOption,
    RevisionOption,
    SignOption,
    ValidDaysOption,
)
from qinfer.cli.output import show, stdout_kept_for_result
from qinfer.errors import UserError


def evaluate(
    model: ModelArgument,
    against: Annotated[
        str | None,
        typer.Option(metavar="REF", help="The dense source to compare with.", show_default=False),
    ] = None,
    profile: ProfileOption = "standard",
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to judge on. Default: reference text kept for it."),
    ] = None,
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
    """Judge MODEL against its source: exit code 1 unless it passes.

    The verdict of a quantized checkpoint is written beside it as JSON and Markdown.
    """
    if (against is None) == (perplexity is None):
        raise UserError("give --against REF for a verdict, or --perplexity FILE for a number", "against")
    common: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "seed": seed}
    common |= {"lm_head_dtype": lm_head_dtype, "revision": revision, "hf_token": hf_token}
    with stdout_kept_for_result():
        from qinfer import jobs

        if perplexity is not None:
            score = jobs.score_text(model, perplexity, windows=windows, window=window, **common)
        else:
            assert against is not None
            sealed: dict[str, Any] = {"sign": sign, "valid_days": valid_days}
            verdict = jobs.evaluate(
                model, against=against, profile=profile, text_file=text, **sealed, **common
            )
    if perplexity is not None:
        show(score.to_dict(), score.to_text(), as_json)
        return
    show(verdict.to_dict(), verdict.to_text(), as_json)
    if verdict.verdict != "PASS":
        raise typer.Exit(1)
