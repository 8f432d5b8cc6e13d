"""Checks of single parameters: each raises a `UserError` of one line that names the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.errors import UserError


def as_list(value: Any, name: str, kind: type) -> list[Any]:
    """`value` as a list of `kind`: None is empty, one entry a list of it; UserError for anything else."""
    if value is None:
        return []
    if isinstance(value, kind) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, Sequence | set | frozenset) or isinstance(value, str | bytes):
        raise UserError(f"{name} must be a list of {kind.__name__}, not {value!r:.100}", name)
    for entry in value:
        if not isinstance(entry, kind) or isinstance(entry, bool):
            raise UserError(f"{name} must hold {kind.__name__} only, not {entry!r:.100}", name)
    return list(value)


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """UserError unless `value` is an int in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, not {value!r:.100}", name)
    if not low <= value <= high:
        raise UserError(f"{name} must lie in [{low}, {high}], not {value}", name)


def check_real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """UserError unless `value` is a finite number in [low, high], or (low, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{name} must be a number, not {value!r:.100}", name)
    inside = (low < value if open_low else low <= value) and value <= high
    if not (inside and math.isfinite(value)):
        bracket = "(" if open_low else "["
        bounds = f" and lie in {bracket}{low:g}, {high:g}]" if math.isfinite(high) else ""
        raise UserError(f"{name} must be finite{bounds}, not {value}", name)


def check_text(name: str, text: str) -> None:
    """UserError for an empty text, or one with half a surrogate pair."""
    if not text:
        raise UserError(f"{name} holds an empty string; leave it out", name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} holds text that is not valid Unicode: {text!r:.100}", name) from None


def bias_from_json(bias: Mapping[Any, float]) -> dict[int, float]:
    """A logit bias with int keys, clamped to [-100, 100]; UserError for another thing."""
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias must map token ids to numbers, not {bias!r:.100}", "logit_bias")
    clamped = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise UserError(
                f"logit_bias has the key {key!r:.100}, which is no token id", "logit_bias"
            ) from None
        check_real("logit_bias", value, -math.inf, math.inf)
        clamped[token] = min(100.0, max(-100.0, float(value)))
    return clamped
