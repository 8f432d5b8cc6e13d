"""The verdict: is the candidate close enough to its source to be served in its place?

The question is one of non-inferiority, not of "no significant difference": a measure passes when its upper
confidence bound lies within the limit, fails when its lower bound lies beyond it, and is undecided between
the two (more text would decide it). Every measure must pass. Comparisons are written so that NaN is never
within a limit (`nan <= limit` is False), and measuring nothing, or too little, is never a pass.

Limits depend on how coarse the format is, since nobody chooses 4 bits to get the fidelity of 8, and on the
size of the model, since small models lose more. They are the one table below.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from qinfer.errors import UserError
from qinfer.evals.statistics import CONFIDENCE, Interval, finite

SchemeClass = Literal["w16", "w8a16", "w8a8", "w4a16"]


class Limits(NamedTuple):
    """What may be lost: KL in nats per token, shares of positions, perplexity as a share of the source's."""

    mean_kl: float
    p99_kl: float
    disagreement: float  # positions whose most likely token changed
    perplexity_excess: float  # ratio - 1

    def scaled(self, factor: float) -> Limits:
        """All limits times `factor`."""
        return Limits(*(factor * limit for limit in self))


class Profile(NamedTuple):
    """How much is measured and how strictly it is judged."""

    num_tokens: int
    scale: float  # of the limits


PROFILES: Mapping[str, Profile] = {
    "strict": Profile(24_576, 0.7),
    "standard": Profile(16_384, 1.0),
    "lenient": Profile(8_192, 1.2),  # plain rounding to 4 bits must fail this one too
}

# ---- The table of limits, per class of scheme, for profile "standard": (up to 1B, from 7B parameters) -----
# Small end: SmolLM2-135M-Instruct served in bfloat16 against itself in float32, built-in text, 8192 or 16384
# tokens (mean KL, p99 KL, disagreement, perplexity excess):
#     bfloat16, nothing quantized   0.0010  0.005  0.025  0.001     must pass
#     w8a16-int8 rtn                0.0040  0.018  0.036  0.001     must pass
#     w8a8-int8 smoothquant         0.0088  0.051  0.054  0.010     must pass
#     w8a8-int8 rtn                 0.030   0.18   0.092  0.024
#     w8a8-fp8 rtn                  0.028   0.18   0.090  0.028     must pass
#     w4a16 g64 asym awq            0.110   0.69   0.174  0.114     must pass
#     w4a16 g32 asym rtn            0.258   1.39   0.251  0.224     must fail
#     w4a16 g64 asym rtn            0.297   1.39   0.274  0.279     must fail
# A limit lies a quarter or more above what must pass and below the lower bound of what must fail. Large end:
# llama.cpp's published KL tables of 7-8B models (q8_0 0.0014, q4_K_M 0.031 with 8 % disagreement), not
# measured here. Between 1B and 7B each limit is interpolated in the logarithms. "w16" (dense against dense:
# another dtype, another KV cache) is judged like 8-bit weights. Re-derive here, and only here.
LIMITS: Mapping[SchemeClass, tuple[Limits, Limits]] = {
    #         mean KL, p99 KL, disagreement, perplexity excess
    "w16": (Limits(0.006, 0.03, 0.045, 0.005), Limits(0.003, 0.03, 0.025, 0.003)),
    "w8a16": (Limits(0.006, 0.03, 0.045, 0.005), Limits(0.003, 0.03, 0.025, 0.003)),
    "w8a8": (Limits(0.040, 0.30, 0.115, 0.045), Limits(0.020, 0.20, 0.050, 0.010)),
    "w4a16": (Limits(0.200, 1.25, 0.220, 0.200), Limits(0.050, 0.50, 0.090, 0.035)),
}
SMALL, LARGE = 1e9, 7e9  # parameters
# ------------------------------------------------------------------------------------------------------------

MIN_WINDOWS = 8  # fewer clusters carry no interval worth a decision

_CLASSES: Mapping[str, SchemeClass] = {
    "dense": "w16",
    "w8a16-int8": "w8a16",
    "w8a8-int8": "w8a8",
    "w8a8-fp8": "w8a8",
    "w4a16": "w4a16",
}
_COARSENESS: tuple[SchemeClass, ...] = ("w16", "w8a16", "w8a8", "w4a16")


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

    @property
    def verdict(self) -> Verdict | None:
        """PASS if the interval lies within the limit, FAIL if beyond it or not a number, else UNDECIDED."""
        if self.limit is None:
            return None
        value, low, high = self.interval
        if self.bound == "at least":
            return _judge(-value, -high, -low, -self.limit)
        return _judge(value, low, high, self.limit)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that is not finite becomes null."""
        return {
            "name": self.name,
            "unit": self.unit,
            **{key: finite(number) for key, number in self.interval._asdict().items()},
            "bound": None if self.limit is None else self.bound,
            "limit": self.limit,
            "verdict": None if self.verdict is None else str(self.verdict),
        }

    def to_text(self) -> str:
        """One line: the measure, its interval, its limit and what that means."""
        value, low, high = self.interval
        line = f"{self.name} {value:.4g} [{low:.4g}, {high:.4g}] {self.unit}".rstrip()
        if self.verdict is None:
            return line
        return f"{line}: {_MEANING[self.verdict]}, {self.bound} {self.limit:.4g}"


class GateResult(NamedTuple):
    """The verdict, why, and what it rests on; `settings` say how to get the same numbers again."""

    verdict: Verdict
    reasons: tuple[str, ...]
    measures: tuple[Measure, ...]
    settings: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what the certificate says, but for the hashes of the files."""
        return {
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "confidence": CONFIDENCE,
            "measures": [measure.to_dict() for measure in self.measures],
            "settings": dict(self.settings),
        }

    def to_text(self) -> str:
        """For a terminal: the verdict, its reasons, then what is reported only."""
        reported = [measure.to_text() for measure in self.measures if measure.verdict is None]
        return "\n".join([str(self.verdict), *(f"  {line}" for line in (*self.reasons, *reported))])


def profile_named(name: str) -> Profile:
    """The profile of that name; raises UserError naming the known ones."""
    if name not in PROFILES:
        raise UserError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}", "profile")
    return PROFILES[name]


def scheme_class(scheme_names: Collection[str]) -> SchemeClass:
    """The class of a model with these schemes in it: that of the coarsest (a model of none is "w16")."""
    classes = [_CLASSES[name] for name in scheme_names]
    return max(classes, key=_COARSENESS.index, default="w16")


def limits_for(scheme: SchemeClass, num_parameters: int, profile: Profile) -> Limits:
    """Limits for a source of that many parameters, interpolated in the logarithms between SMALL and LARGE."""
    small, large = LIMITS[scheme]
    share = (math.log(max(num_parameters, 1)) - math.log(SMALL)) / (math.log(LARGE) - math.log(SMALL))
    share = min(max(share, 0.0), 1.0)
    between = (a ** (1 - share) * b**share for a, b in zip(small, large, strict=True))
    return Limits(*between).scaled(profile.scale)


def decide(
    measures: Collection[Measure], *, num_tokens: int, num_windows: int, wanted: int
) -> tuple[Verdict, list[str]]:
    """The verdict over all measures that have a limit, and the reasons, those that decided it first."""
    if num_tokens == 0 or not any(measure.verdict for measure in measures):
        return Verdict.UNDECIDED, ["nothing was measured: no token of text was scored"]
    by_verdict = {v: [m.to_text() for m in measures if m.verdict == v] for v in Verdict}
    if by_verdict[Verdict.FAIL]:
        return Verdict.FAIL, by_verdict[Verdict.FAIL]
    short = []
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
