"""Limits by scheme, size and profile: one table, ordered, interpolated in the logarithms."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest

from qinfer.errors import UserError
from qinfer.evals.thresholds import (
    LIMITS,
    OTHER_TEXT,
    PROFILES,
    SchemeClass,
    limits_for,
    profile_named,
    scheme_class,
)


def test_limits_run_from_small_to_large_in_the_logarithms() -> None:
    small, large = LIMITS["w4a16"]
    standard = PROFILES["standard"]
    assert limits_for("w4a16", 135_000_000, standard) == pytest.approx(small)
    assert limits_for("w4a16", 10**9, standard) == pytest.approx(small)
    assert limits_for("w4a16", 70 * 10**9, standard) == pytest.approx(large)
    middle = limits_for("w4a16", round(math.sqrt(7) * 1e9), standard)
    assert middle == pytest.approx([math.sqrt(a * b) for a, b in zip(small, large, strict=True)], rel=1e-6)


def test_another_text_widens_what_is_measured_on_text_alone() -> None:
    standard = PROFILES["standard"]
    built_in, other = (limits_for("w4a16", 1, standard, other_text=other) for other in (False, True))
    assert other[:-1] == pytest.approx([OTHER_TEXT * limit for limit in built_in[:-1]])
    assert other.accuracy_lost == built_in.accuracy_lost


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
    assert scheme_class(["w8a8-fp8-static", "w8a16-int8"]) == "w8a8"
    assert scheme_class(["w8a16-fp8"]) == "w8a8"  # three bits of fraction
    with pytest.raises(UserError, match="no limits for the scheme 'w2a16'"):
        scheme_class(["dense", "w2a16"])
