"""How verdicts and numbers are written, the same in every report."""

from __future__ import annotations

from collections.abc import Mapping

HEADLINE: Mapping[str, str] = {
    "PASS": "It may be served in place of its source",
    "FAIL": "It is not close enough to its source to be served in its place",
    "UNDECIDED": "What was measured does not decide it, so it is not served",
}


def number(value: float | None) -> str:
    """Four digits; JSON has null where a number is not finite."""
    return "not finite" if value is None else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share in per cent, one decimal where it has one."""
    return "not finite" if share is None else f"{100 * share:.1f}".removesuffix(".0") + " %"


def one_line(text: str) -> str:
    """A text from a file that anybody may have written, with escapes for what is not seen in a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
