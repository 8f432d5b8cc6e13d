"""The verdict: is the candidate close enough to its source to be served in its place?

The question is one of non-inferiority, not of "no significant difference": a measure passes when its upper
confidence bound lies within the limit, fails when its lower bound lies beyond it, and is undecided between
the two (more text would decide it). Every measure must pass. Comparisons are written so that NaN is never
within a limit (`nan <= limit` is False), and measuring nothing, or too little, is never a pass.

The limits themselves are in `thresholds`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qinfer.evals.blame import Blame
from qinfer.evals.statistics import CONFIDENCE, Interval, finite

if TYPE_CHECKING:
    from qinfer.evals.offer import Offer

MIN_WINDOWS = 8  # fewer clusters carry no interval worth a decision
POWER = 0.80  # probability with which a measure's verdict is right where `Power` says so


class Power(NamedTuple):
    """What so much text can tell: true values that PASS, or FAIL, with probability POWER."""

    passes_at: float
    fails_at: float


class Verdict(StrEnum):
    """What the gate says."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"


_MEANING = {Verdict.PASS: "as required", Verdict.FAIL: "not as required", Verdict.UNDECIDED: "undecided"}


class Measure(NamedTuple):
    """One number with its interval and, unless it is reported only, its limit and verdict."""

    name: str
    unit: str
    interval: Interval
    limit: float | None = None
    bound: Literal["at most", "at least"] = "at most"
    confidence: float = CONFIDENCE  # of the interval

    @property
    def verdict(self) -> Verdict | None:
        """PASS if the interval lies within the limit, FAIL if beyond it or not a number, else UNDECIDED."""
        if self.limit is None:
            return None
        value, low, high = self.interval
        if self.bound == "at least":
            return _judge(-value, -high, -low, -self.limit)
        return _judge(value, low, high, self.limit)

    @property
    def power(self) -> Power | None:
        """How far from the limit a true value must lie for the verdict to find it with probability POWER.

        A bound lies z(0.95) standard errors from the estimate, and the estimate itself falls short of the
        truth by z(POWER) of them in one of five samples; errors are read off the interval.
        """
        if self.limit is None:
            return None
        reach = 1 + NormalDist().inv_cdf(POWER) / NormalDist().inv_cdf((1 + self.confidence) / 2)
        value, low, high = self.interval
        down, up = reach * (value - low), reach * (high - value)
        if self.bound == "at least":
            return Power(self.limit + down, self.limit - up)
        return Power(self.limit - up, self.limit + down)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that is not finite becomes null."""
        power = self.power
        return {
            "name": self.name,
            "unit": self.unit,
            **{key: finite(number) for key, number in self.interval._asdict().items()},
            "confidence": self.confidence,
            "bound": None if self.limit is None else self.bound,
            "limit": self.limit,
            "verdict": None if self.verdict is None else str(self.verdict),
            "power": power and {key: finite(number) for key, number in power._asdict().items()},
        }

    def to_text(self) -> str:
        """One line: the measure, its interval, its limit and what that means."""
        value, low, high = self.interval
        line = f"{self.name} {value:.4g} [{low:.4g}, {high:.4g}] {self.unit}".rstrip()
        if self.verdict is None:
            return line
        return f"{line}: {_MEANING[self.verdict]}, {self.bound} {self.limit:.4g}"


class GateResult(NamedTuple):
    """The verdict, why, and what it rests on; `settings` say how to get the same numbers again.

    `blame` says which part of a failed candidate did it, where parts could be told apart, `offer` what would
    pass in its place; `evidence` what was measured task by task and what it cost (JSON-ready); `examples`
    what a person may want to see of it, which is for reports and not for certificates.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    measures: tuple[Measure, ...]
    settings: Mapping[str, Any]
    blame: Blame | None = None
    evidence: Mapping[str, Any] = MappingProxyType({})
    examples: Mapping[str, Any] = MappingProxyType({})
    offer: Offer | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what the certificate says, but for the hashes of the files."""
        return {
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "confidence": CONFIDENCE,
            "power": POWER,
            "measures": [measure.to_dict() for measure in self.measures],
            "evidence": dict(self.evidence),
            "settings": dict(self.settings),
            "blame": None if self.blame is None else self.blame.to_dict(),
            "offer": None if self.offer is None else self.offer.to_dict(),
        }

    def to_text(self) -> str:
        """For a terminal: the verdict, its reasons, then what is reported only."""
        reported = [measure.to_text() for measure in self.measures if measure.verdict is None]
        after = [part.line for part in (self.blame, self.offer) if part is not None]
        return "\n".join([str(self.verdict), *(f"  {line}" for line in (*self.reasons, *after, *reported))])


def decide(
    measures: Collection[Measure],
    *,
    num_tokens: int,
    num_windows: int,
    wanted: int,
    unsettled: Collection[str] = (),
) -> tuple[Verdict, list[str]]:
    """The verdict over all measures that have a limit, and the reasons, those that decided it first.

    `unsettled` says of evidence that was asked for what is missing to judge it; with any there is no PASS.
    """
    if num_tokens == 0 or not any(measure.verdict for measure in measures):
        little = "too little was measured to judge any of it"
        nothing = "nothing was measured: no token of text was scored"
        return Verdict.UNDECIDED, [little if num_tokens else nothing, *unsettled]
    by_verdict = {v: [m.to_text() for m in measures if m.verdict == v] for v in Verdict}
    if by_verdict[Verdict.FAIL]:
        return Verdict.FAIL, by_verdict[Verdict.FAIL]
    short = list(unsettled)
    if num_tokens < wanted:
        short.append(f"{num_tokens} tokens were scored and the profile wants {wanted}: give a longer text")
    if num_windows < MIN_WINDOWS:
        short.append(f"{num_windows} windows carry no interval, {MIN_WINDOWS} are needed: give a longer text")
    if by_verdict[Verdict.UNDECIDED] or short:
        return Verdict.UNDECIDED, [*by_verdict[Verdict.UNDECIDED], *short]
    return Verdict.PASS, by_verdict[Verdict.PASS]


def _judge(value: float, low: float, high: float, limit: float) -> Verdict:
    if not math.isfinite(value):
        return Verdict.FAIL
    if high <= limit:
        return Verdict.PASS
    return Verdict.UNDECIDED if low <= limit else Verdict.FAIL
