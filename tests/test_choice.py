"""What is worth choosing: nothing that passed is at least as good in all and better in one."""

from __future__ import annotations

import json
import math

import pytest

from qinfer.choice import Choice, Option
from qinfer.evals.gate import GateResult, Verdict
from qinfer.evals.statistics import Interval

PASS, FAIL, OPEN = Verdict.PASS, Verdict.FAIL, Verdict.UNDECIDED


def option(name: str, size: int, speed: float, quality: float, verdict: Verdict = PASS) -> Option:
    interval = Interval(quality, quality - 0.01, quality + 0.01)
    return Option(name, ("w8a8-int8",), size, speed, interval, GateResult(verdict, (), (), {}))


def choice(*options: Option) -> Choice:
    return Choice(options, "recovery on tasks", "source", 1000, 10.0)


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ([option("a", 500, 20, 0.99), option("b", 300, 20, 0.95)], ["a", "b"]),
        ([option("a", 500, 20, 0.99), option("b", 500, 20, 0.95)], ["a"]),
        ([option("a", 500, 20, 0.95), option("b", 500, 30, 0.95), option("c", 500, 25, 0.99)], ["b", "c"]),
        ([option("a", 500, 20, 0.95), option("b", 500, 20, 0.95)], ["a", "b"]),
        ([option("a", 500, 20, 0.95), option("b", 100, 90, 0.99, FAIL)], ["a"]),
        ([option("a", 500, 20, 0.95, OPEN), option("b", 100, 90, math.nan, FAIL)], []),
    ],
)
def test_what_is_worth_choosing(options: list[Option], best: list[str]) -> None:
    assert [one.name for one in choice(*options).worth_choosing()] == best


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [((PASS, PASS), PASS), ((PASS, OPEN), OPEN), ((OPEN, FAIL), FAIL), ((PASS, FAIL), FAIL)],
)
def test_all_must_pass(verdicts: tuple[Verdict, ...], whole: Verdict) -> None:
    assert choice(*(option(str(i), 1, 1, 0.9, v) for i, v in enumerate(verdicts))).verdict is whole


def test_a_table_for_a_terminal_and_standard_json() -> None:
    found = choice(option("int8", 163_000_000, 26.04, 0.9912), option("bad", 1, 1, math.nan, FAIL))
    lines = found.to_text().splitlines()
    assert lines[0].split() == ["MB", "tok/s", "recovery", "on", "tasks"]
    assert lines[1].split() == ["source", "0.0", "10.0"]
    assert lines[2].split() == ["int8", "163.0", "26.0", "99.1", "%", "[98.1,", "100.1]", "PASS"]
    assert lines[4] == "worth choosing: int8"
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["options"][1]["quality"] == {"value": None, "low": None, "high": None}
    assert [one["worth_choosing"] for one in document["options"]] == [True, False]
