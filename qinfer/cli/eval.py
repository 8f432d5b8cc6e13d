"""`qinfer eval`: the gate's verdict on a checkpoint, measured against its source."""

from __future__ import annotations

from typing import Annotated

import typer

from qinfer.cli.options import (
    JsonOption,
    KVCacheDtypeOption,
    ModelArgument,
    ProfileOption,
)
from qinfer.cli.output import show, stdout_kept_for_result


def evaluate(
    model: ModelArgument,
    against: Annotated[
        str, typer.Option(metavar="REF", help="The source model to compare with.", show_default=False)
    ],
    profile: ProfileOption = "standard",
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Judge MODEL against its source and write the verdict beside it: exit code 1 unless it passes."""
    with stdout_kept_for_result():
        from qinfer import jobs

        result = jobs.evaluate(
            model, against=against, profile=profile, kv_cache_dtype=kv_cache_dtype, seed=seed
        )
    show(result.to_dict(), result.to_text(), as_json)
    if result.verdict != "PASS":
        raise typer.Exit(1)
