"""The gate's verdict, and what is written of it beside a checkpoint so that it may be served."""

from __future__ import annotations

import gc
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from qinfer import compare, reading, waiting
from qinfer.errors import GateError, check_counts
from qinfer.evals import certificate, report
from qinfer.evals.gate import GateResult
from qinfer.evals.signature import Signer

logger = logging.getLogger(__name__)

PAGE_NAME = "qinfer_gate.html"  # the report for a browser, beside the certificate


class Seal(NamedTuple):
    """Who vouches for a certificate, and for how long."""

    signer: Signer | None
    valid_days: int | None

    @classmethod
    def prepare(cls, sign: str | Path | None, valid_days: int | None) -> Seal:
        """Reads the key before anything is measured; UserError where it is none, or for less than a day."""
        check_counts(valid_days=valid_days)
        return cls(None if sign is None else Signer.load(Path(sign)), valid_days)


def certify(comparison: compare.Comparison, seal: Seal, *, progress: bool) -> GateResult:
    """Judges, and writes certificate and report beside a candidate that needs them to be served."""
    checkpoint = comparison.candidate.checkpoint
    hashes = comparison.candidate.hashes  # before anything is loaded
    result = compare.judge(comparison, progress=progress)
    if checkpoint.is_quantized:
        _warn_if_lost(checkpoint.path, result)
        document = result.to_dict()
        certificate.write(
            checkpoint.path,
            document,
            hashes,
            report.markdown(document, result.examples),
            signer=seal.signer,
            valid_days=seal.valid_days,
        )
        report.write(checkpoint.path / PAGE_NAME, result, kinds=("html",))
        waiting.is_over(checkpoint.path)
    return result


def _warn_if_lost(folder: Path, result: GateResult) -> None:
    """Says where this verdict takes the place of one that had the checkpoint served."""
    try:
        stood = certificate.read(folder)["verdict"]
    except GateError:
        return
    if stood == "PASS" != result.verdict:
        logger.warning(
            "%s takes the place of the PASS of %s, which will not be served now: measured as it was then, it "
            "may pass again",
            result.verdict,
            folder,
        )


@dataclass
class Judge:
    """Has the gate judge what lies in a folder, as often as that changes; `last` is what it said then."""

    folder: Path
    source: reading.OpenModel
    profile: str
    seal: Seal
    progress: bool
    last: GateResult | None = None

    def passes(self, *, explain: bool = True) -> bool:
        """Judges and certifies; without `explain` a failure is not looked into."""
        gc.collect()  # what calibration held is gone before two models are loaded
        candidate = reading.open_model(str(self.folder))
        serving = reading.Serving.settle("auto", "auto", candidate.checkpoint)
        comparison = compare.Comparison(candidate, serving, self.source, self.profile, explain=explain)
        try:
            self.last = certify(comparison, self.seal, progress=self.progress)
        except BaseException:  # an interrupt too, and what an extension makes of one
            self._say_how_to_go_on()
            raise
        return self.last.verdict == "PASS"

    def _say_how_to_go_on(self) -> None:
        words = ["qinfer", "eval", str(self.folder), "--against", self.source.name, "--profile", self.profile]
        logger.warning(
            "%s is written but not judged: the same command goes on with judging, or judge it with `%s`",
            self.folder,
            shlex.join(words),
        )
