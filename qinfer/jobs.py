"""Quantize -> gate -> certificate: the one place that knows both calibrate and evals.

`quantize` makes a checkpoint and has it judged against the model it came from; `evaluate` judges one that
exists. The verdict decides nothing here: it is written beside the checkpoint, the command line turns it into
an exit code, and serving obeys it. Only a quantized candidate gets a certificate; a dense one needs none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from qinfer import compare, reading, waiting
from qinfer.calibrate import mixed_run, pipeline
from qinfer.calibrate.data import DEFAULT_SEED
from qinfer.calibrate.job import QuantizeJob
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.report import QuantizeReport
from qinfer.calibrate.settings import Settings
from qinfer.certifying import Judge, Seal, certify
from qinfer.errors import UserError, check_flags, check_seed
from qinfer.evals import report
from qinfer.evals.budget import parse_budget
from qinfer.evals.gate import GateResult
from qinfer.evals.thresholds import profile_named


class QuantizeResult(NamedTuple):
    """The checkpoint that was written, how it was made, and what the gate says of it (None: not asked)."""

    out: Path
    report: QuantizeReport
    gate: GateResult | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        gate = None if self.gate is None else self.gate.to_dict()
        return {"out": str(self.out), "report": self.report.to_dict(), "gate": gate}

    def to_text(self) -> str:
        """For a terminal: what was written, then the verdict."""
        not_judged = f"not judged: get a verdict with `qinfer eval {self.out} --against REF`"
        lines = [self.report.to_text(), not_judged if self.gate is None else self.gate.to_text()]
        if self.gate is not None and self.gate.verdict != "PASS":
            lines.append("repair: the same command with --until-gate gives 8 bits to what does most damage")
        return "\n".join(lines)


def quantize(
    model: str,
    out: Path | str,
    *,
    scheme: str = "int8",
    method: str | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    ranges: str | None = None,
    kv_scales: str | None = None,
    rotate: bool = False,
    budget: float | None = None,
    until_gate: bool = False,
    calibration: str | None = None,
    num_samples: int | None = None,
    max_seq_len: int | None = None,
    seed: int = DEFAULT_SEED,
    gate: bool = True,
    profile: str = "standard",
    overwrite: bool = False,
    resume: bool = True,
    device: str | None = None,
    sign: str | Path | None = None,
    valid_days: int | None = None,
    revision: str | None = None,
    hf_token: str | None = None,
    progress: bool = True,
) -> QuantizeResult:
    """Writes a quantized checkpoint of `model` to `out` and has the gate judge it, as it will be served.

    Where an earlier call with the same arguments was stopped, this one goes on behind the last layer that is
    finished, unless told not to `resume`; where all were, only the judging is done again, with `overwrite`
    too, and `until_gate` goes on from that step. With a `budget`, average bits per weight, the units that do
    most damage get 8 bits; with `until_gate` more and more of them do until the gate passes it. `device` is
    "auto" (or None: a GPU where there is one), "cpu", "cuda" or "cuda:N". `sign` and `valid_days` are for the
    certificate, as in `prepare`.
    Raises UserError for anything that was asked for and cannot be, before the calibration starts.
    """
    profile_named(profile)
    check_flags(gate=gate, overwrite=overwrite, until_gate=until_gate, resume=resume)
    if until_gate and not gate:
        raise UserError("until_gate raises units until the gate passes: it cannot go without", "until_gate")
    settings = Settings(
        scheme=scheme,
        method=method,
        group_size=group_size,
        symmetric=symmetric,
        ranges=ranges,
        kv_scales=kv_scales,
        rotate=rotate,
        calibration=calibration,
        num_samples=num_samples,
        max_seq_len=max_seq_len,
        seed=seed,
        device=device,
    )
    seal = Seal.prepare(sign, valid_days)
    folder = _folder_to_write(out)
    source = reading.open_model(model, revision=revision, token=hf_token)
    call = waiting.call_of(source, {**asdict(settings), "budget": budget, "until_gate": until_gate})
    judge = Judge(folder, source, profile, seal, progress)
    made = waiting.found(folder, call, overwrite=overwrite) if gate else None
    if made is None or until_gate:
        job = prepare_job(
            source.checkpoint,
            source.tokenizer,
            folder,
            settings,
            mixing=budget is not None or until_gate,
            budget=budget,
            overwrite=overwrite or made is not None,
            resume=resume,
            progress=progress,
        )
        if until_gate:
            return QuantizeResult(folder, _until_gate(job, made, judge, call, budget), judge.last)
        if budget is not None:
            job = mixed_run.within(mixed_run.with_costs(job, progress=progress), budget)
        made = pipeline.run(job, progress=progress, extra_files=waiting.note(call) if gate else {})
        del job
    if gate:
        judge.passes()
    return QuantizeResult(folder, made, judge.last)


def _until_gate(
    job: QuantizeJob,
    made: QuantizeReport | None,
    judge: Judge,
    call: dict[str, Any],
    budget: float | None,
) -> QuantizeReport:
    """Raises units until the gate passes, from the step on that an interrupted `call` had `made`."""

    def passes(_: QuantizeReport) -> bool:
        if judge.passes(explain=False):  # each failure is followed by another try
            return True
        waiting.wait(job.out, call)  # an interrupted run goes on from here
        return False

    if made is None:
        job = mixed_run.with_costs(job, progress=judge.progress)
    else:
        job = mixed_run.resumed(job, made)
    note = waiting.note(call)
    made = mixed_run.run_until(
        job, passes, made=made, budget=budget, progress=judge.progress, extra_files=note
    )
    waiting.is_over(job.out)
    assert judge.last is not None
    if judge.last.verdict == "FAIL":
        judge.passes()  # what was measured is kept
    return made


class Options(TypedDict, total=False):
    """Keywords of `evaluate`, which `prepare` explains."""

    profile: str
    text_file: str | Path | None
    tasks: Sequence[str] | None
    limit: int | None
    num_fewshot: int | None
    chat: bool
    budget: str | None
    keep: bool
    dtype: str
    kv_cache_dtype: str
    lm_head_dtype: str
    seed: int
    sign: str | Path | None
    valid_days: int | None
    revision: str | None
    hf_token: str | None
    progress: bool


def evaluate(
    model: str, *, against: str, report_file: str | Path | None = None, **options: Unpack[Options]
) -> GateResult:
    """Judges `model` against its dense source; for a quantized one, writes certificate and report beside it.

    `report_file` is written with .html, .md and .json. `options` are those of `prepare`, which says what is
    refused.
    """
    result = prepare(model, against=against, **options).carry_out()
    if report_file is not None:
        report.write(Path(report_file), result)
    return result


class Order(NamedTuple):
    """A comparison that can be made, and what becomes of its verdict."""

    comparison: compare.Comparison
    seal: Seal
    progress: bool

    def carry_out(self) -> GateResult:
        """Judges and, for a quantized candidate, certifies."""
        return certify(self.comparison, self.seal, progress=self.progress)


def prepare(
    model: str,
    *,
    against: str,
    profile: str = "standard",
    text_file: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    budget: str | None = None,
    keep: bool = True,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    lm_head_dtype: str = "auto",
    seed: int = 0,
    sign: str | Path | None = None,
    valid_days: int | None = None,
    revision: str | None = None,
    hf_token: str | None = None,
    progress: bool = True,
) -> Order:
    """Opens both models and checks what is asked for, before anything is measured.

    `text_file` replaces the built-in held-out text; `tasks`, as `evals.tasks` names them (None: the profile's
    own, which only "strict" has), are asked too, the first `limit` questions of each. A `budget` ("10m") is
    spent where it decides most; without one all is measured that the profile wants. What is measured is kept
    in the cache folder, unless told not to `keep` it. The dtypes are those that will serve. `sign` is the
    file of a private key for the certificate; after `valid_days` (None: never) its verdict is void.
    Raises UserError for an unknown option, models that cannot be compared, or what cannot be read.
    """
    profile_named(profile)
    check_seed(seed)
    check_flags(chat=chat, keep=keep)
    seconds = None if budget is None else parse_budget(budget)
    questions = compare.Questions.chosen(tasks, profile, limit, num_fewshot, chat)
    seal = Seal.prepare(sign, valid_days)
    candidate = reading.open_model(model, revision=revision, token=hf_token)
    source = reading.open_model(against, token=hf_token)
    compare.check_comparable(candidate, source)
    serving = reading.Serving.settle(dtype, kv_cache_dtype, candidate.checkpoint, lm_head_dtype)
    text_path = None if text_file is None else Path(text_file)
    comparison = compare.Comparison(
        candidate, serving, source, profile, text_path, seed, questions, seconds, keep
    )
    return Order(comparison, seal, progress)


def _folder_to_write(out: object) -> Path:
    """`out` as a path; UserError for what names no folder, such as "" (which Path takes for ".")."""
    if not isinstance(out, str | os.PathLike) or not str(out).strip() or "\0" in str(out):
        raise UserError(f"out must name a folder to write, not {out!r:.100}", "out")
    return Path(out)
