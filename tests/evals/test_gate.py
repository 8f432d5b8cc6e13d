"""The verdict: non-inferiority with intervals, the power of a measure, and NaN never passes."""

from __future__ import annotations

import math
import random
from statistics import NormalDist
from typing import Literal, get_args

import pytest

from qinfer.evals.gate import Measure, Verdict, decide
from qinfer.evals.statistics import Interval

NAN = math.nan


def at_most(low: float, value: float, high: float, limit: float = 0.05) -> Measure:
    return Measure("mean KL", "nats/token", Interval(value, low, high), limit)


GOOD, BAD, OPEN = at_most(0.01, 0.02, 0.03), at_most(0.06, 0.07, 0.08), at_most(0.04, 0.05, 0.06)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.01, 0.02, 0.05), "PASS"),
        ((0.05, 0.06, 0.07), "UNDECIDED"),
        ((0.04, 0.045, 0.0501), "UNDECIDED"),
        ((0.0501, 0.06, 0.07), "FAIL"),
        ((0.0, 0.0, 0.0), "PASS"),
        ((-math.inf, 0.01, math.inf), "UNDECIDED"),
        ((NAN, NAN, NAN), "FAIL"),
        ((0.0, NAN, 0.0), "FAIL"),
        ((NAN, 0.0, NAN), "FAIL"),
        ((0.0, 0.0, NAN), "UNDECIDED"),
        ((0.0, math.inf, math.inf), "FAIL"),
        ((0.0, -math.inf, 0.0), "FAIL"),
    ],
)
def test_e10_verdict_of_one_measure(interval: tuple[float, float, float], verdict: str) -> None:
    low, value, high = interval
    assert at_most(low, value, high).verdict == verdict


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.90, 0.92, 0.95), "PASS"),
        ((0.85, 0.89, 0.91), "UNDECIDED"),
        ((0.7, 0.8, 0.85), "FAIL"),
        ((NAN,) * 3, "FAIL"),
    ],
)
def test_at_least_is_the_mirror_image(interval: tuple[float, float, float], verdict: str) -> None:
    low, value, high = interval
    assert Measure("top-1", "", Interval(value, low, high), 0.89, "at least").verdict == verdict


def test_a_measure_without_a_limit_has_no_verdict() -> None:
    assert Measure("perplexity", "per token", Interval(NAN, NAN, NAN)).verdict is None


def test_every_measure_must_pass_and_the_worst_comes_first() -> None:
    size = {"num_tokens": 100, "num_windows": 10, "wanted": 100}
    assert decide([GOOD, GOOD], **size)[0] is Verdict.PASS
    assert decide([GOOD, OPEN], **size)[0] is Verdict.UNDECIDED
    verdict, reasons = decide([GOOD, OPEN, BAD], **size)
    assert verdict is Verdict.FAIL
    assert reasons == ["mean KL 0.07 [0.06, 0.08] nats/token: not as required, at most 0.05"]


def test_e10_nothing_or_too_little_never_passes() -> None:
    assert decide([], num_tokens=0, num_windows=0, wanted=100)[0] is Verdict.UNDECIDED
    assert decide([GOOD], num_tokens=0, num_windows=0, wanted=0)[0] is Verdict.UNDECIDED
    assert (
        decide([Measure("x", "", GOOD.interval)], num_tokens=9, num_windows=9, wanted=1)[0]
        is Verdict.UNDECIDED
    )
    verdict, reasons = decide([GOOD], num_tokens=99, num_windows=10, wanted=100)
    assert verdict is Verdict.UNDECIDED
    assert "99 tokens were scored and the profile wants 100" in reasons[0]
    assert decide([GOOD], num_tokens=100, num_windows=7, wanted=100)[0] is Verdict.UNDECIDED
    assert decide([BAD], num_tokens=1, num_windows=1, wanted=100)[0] is Verdict.FAIL


def test_power_says_how_far_from_the_limit_a_truth_must_lie() -> None:
    """By simulation: at `passes_at` four of five samples pass, at `fails_at` four of five fail."""
    error, z = 0.004, NormalDist().inv_cdf(0.95)

    def measure(value: float, bound: Literal["at most", "at least"]) -> Measure:
        interval = Interval(value, value - z * error, value + z * error)
        return Measure("mean KL", "nats/token", interval, 0.05, bound)

    draw = random.Random(0)
    for bound in get_args(Literal["at most", "at least"]):
        power = measure(0.05, bound).power
        assert power is not None
        for truth, verdict in ((power.passes_at, "PASS"), (power.fails_at, "FAIL")):
            verdicts = [measure(draw.gauss(truth, error), bound).verdict for _ in range(4000)]
            assert verdicts.count(Verdict(verdict)) / 4000 == pytest.approx(0.80, abs=0.02)
    assert Measure("perplexity", "", Interval(1, 0, 2)).power is None
    assert Measure("KL", "", Interval(NAN, NAN, NAN), 0.1).to_dict()["power"] == {
        "passes_at": None,
        "fails_at": None,
    }
