"""`qinfer quantize`: make a smaller checkpoint and have the gate judge it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.options import (
    HubTokenOption,
    JsonOption,
    ModelArgument,
    ProfileOption,
    RevisionOption,
    SignOption,
    ValidDaysOption,
)
from qinfer.cli.output import show, stdout_kept_for_result
from qinfer.errors import UserError

if TYPE_CHECKING:
    from qinfer.calibrate.dry_run import DryRun


def quantize(
    model: ModelArgument,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write.", show_default=False)],
    scheme: Annotated[
        str,
        typer.Option(
            help="A preset (int8, fp8, awq, gptq) or a scheme: w8a8-int8, w8a16-int8, w8a8-fp8, "
            "w8a8-fp8-static, w8a8-fp8-block, w8a16-fp8, w4a16.",
        ),
    ] = "int8",
    method: Annotated[
        str | None,
        typer.Option(
            help="rtn, smoothquant, awq, gptq, smoothquant+gptq or awq+gptq. Default: the scheme's usual.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale (w4a16): 128, 64 or 32.", show_default=False),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--sym/--asym", help="Without or with zero points (w4a16).", show_default=False),
    ] = None,
    ranges: Annotated[
        str | None,
        typer.Option(
            help="What weights' ranges are judged by: absmax, mse, imatrix or output. Default: the method's.",
            show_default=False,
        ),
    ] = None,
    kv_scales: Annotated[
        str | None,
        typer.Option(help="Scales for an 8-bit KV cache: fp8, fp8-head or int8-head.", show_default=False),
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Merge rotations that spread outliers into the weights first.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Average bits per weight, above the scheme's own: what does most damage gets 8.",
            show_default=False,
        ),
    ] = None,
    until_gate: Annotated[
        bool, typer.Option("--until-gate", help="Give more and more layers 8 bits until the gate passes.")
    ] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="FILE.txt, FILE.jsonl, a hub dataset, or self. Default: reference text and self.",
            show_default=False,
        ),
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Calibration sequences.", show_default=False)
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the calibration.")] = 42,
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Judge the result against MODEL.")] = True,
    profile: ProfileOption = "standard",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what is in --out. If this very command was interrupted there while it judged, "
            "it goes on with judging.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            help="Go on behind the last layer that this very command finished before it was stopped.",
        ),
    ] = True,
    device: Annotated[
        str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:N.")
    ] = "auto",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print what it will take: time, RAM, VRAM and disk. Reads a config.json."
        ),
    ] = False,
    sign: SignOption = None,
    valid_days: ValidDaysOption = None,
    revision: RevisionOption = None,
    hf_token: HubTokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize MODEL into a folder and judge the result: exit code 1 unless the gate passes it."""
    asked: dict[str, Any] = {
        "scheme": scheme,
        "method": method,
        "group_size": group_size,
        "symmetric": symmetric,
        "ranges": ranges,
        "kv_scales": kv_scales,
        "rotate": rotate,
        "calibration": calibration,
        "num_samples": num_samples,
        "max_seq_len": max_seq_len,
        "seed": seed,
        "device": device,
    }
    where: dict[str, Any] = {"revision": revision, "hf_token": hf_token}
    with stdout_kept_for_result():
        from qinfer import jobs

        result: DryRun | jobs.QuantizeResult
        try:
            if dry_run:
                mixing = budget is not None or until_gate
                result = _plan(model, out, asked, mixing=mixing, budget=budget, overwrite=overwrite, **where)
            else:
                result = jobs.quantize(
                    model,
                    out,
                    budget=budget,
                    until_gate=until_gate,
                    gate=gate,
                    profile=profile,
                    overwrite=overwrite,
                    resume=resume,
                    sign=sign,
                    valid_days=valid_days,
                    **asked,
                    **where,
                )
        except UserError as error:  # which calls it `symmetric`, a word that nobody typed
            if error.parameter != "symmetric":
                raise
            flag = "--sym" if symmetric else "--asym"
            raise UserError(
                f"{flag} is for --scheme w4a16 or awq, not for {scheme}: leave it out", flag
            ) from None
    show(result.to_dict(), result.to_text(), as_json)
    if isinstance(result, jobs.QuantizeResult) and result.gate is not None and result.gate.verdict != "PASS":
        raise typer.Exit(1)


def _plan(
    model: str,
    out: str,
    asked: dict[str, Any],
    *,
    mixing: bool,
    budget: float | None,
    overwrite: bool,
    revision: str | None,
    hf_token: str | None,
) -> DryRun:
    """What a run takes, from the configuration alone: of a hub model nothing else is fetched."""
    from qinfer import hub
    from qinfer.calibrate import dry_run
    from qinfer.calibrate.settings import Settings
    from qinfer.checkpoint.dummy import open_dummy

    settings = Settings(**asked)
    folder = hub.config_file(model, revision=revision, token=hf_token).parent
    return dry_run.plan(
        open_dummy(folder), Path(out), settings, mixing=mixing, budget=budget, overwrite=overwrite
    )
