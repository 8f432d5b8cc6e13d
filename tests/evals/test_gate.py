"""The verdict: non-inferiority with intervals, limits by scheme, size and profile, and NaN never passes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest

from qinfer.errors import UserError
from qinfer.evals.gate import (
    LIMITS,
    PROFILES,
    Measure,
    SchemeClass,
    Verdict,
    decide,
    limits_for,
    profile_named,
    scheme_class,
)
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


def test_limits_run_from_small_to_large_in_the_logarithms() -> None:
    small, large = LIMITS["w4a16"]
    standard = PROFILES["standard"]
    assert limits_for("w4a16", 135_000_000, standard) == pytest.approx(small)
    assert limits_for("w4a16", 10**9, standard) == pytest.approx(small)
    assert limits_for("w4a16", 70 * 10**9, standard) == pytest.approx(large)
    middle = limits_for("w4a16", round(math.sqrt(7) * 1e9), standard)
    assert middle == pytest.approx([math.sqrt(a * b) for a, b in zip(small, large, strict=True)], rel=1e-6)


def test_profiles_ask_for_more_and_allow_less() -> None:
    strict, standard, lenient = (profile_named(name) for name in ("strict", "standard", "lenient"))
    assert strict.num_tokens > standard.num_tokens > lenient.num_tokens
    assert standard.num_tokens >= 16_384
    assert strict.scale < standard.scale == 1 < lenient.scale
    assert limits_for("w8a8", 1, strict) == limits_for("w8a8", 1, standard).scaled(strict.scale)
    with pytest.raises(UserError, match="unknown profile 'loose'; known: strict, standard, lenient"):
        profile_named("loose")


def test_the_table_of_limits_is_ordered() -> None:
    """Coarser formats and smaller models may lose more, never less."""
    classes = get_args(SchemeClass)
    assert tuple(LIMITS) == classes
    for small, large in LIMITS.values():
        assert all(a >= b > 0 for a, b in zip(small, large, strict=True))
    for finer, coarser in pairwise(classes):
        for end in (0, 1):
            assert all(a <= b for a, b in zip(LIMITS[finer][end], LIMITS[coarser][end], strict=True))


def test_the_class_is_that_of_the_coarsest_scheme() -> None:
    assert scheme_class(["dense"]) == "w16"
    assert scheme_class([]) == "w16"
    assert scheme_class(["dense", "w8a16-int8"]) == "w8a16"
    assert scheme_class(["w8a8-fp8", "w8a16-int8"]) == "w8a8"
    assert scheme_class(["w8a8-int8", "w4a16", "dense"]) == "w4a16"
