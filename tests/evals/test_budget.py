"""Time goes where it decides; few looks share one error; what is missing is said."""

from __future__ import annotations

import math

import pytest
import torch

from qinfer.errors import UserError
from qinfer.evals.budget import LOOKS, Evidence, gather, parse_budget
from qinfer.evals.gate import Measure, Verdict
from qinfer.evals.statistics import CONFIDENCE, mean_interval


class Clock:
    """Moves when somebody works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Normal:
    """Units with a mean and a deviation; each takes `cost` seconds."""

    unit = "units"

    def __init__(
        self,
        clock: Clock,
        mean: float,
        *,
        limit: float = 1.0,
        deviation: float = 0.5,
        size: int = 400,
        least: int = 8,
        cost: float = 1.0,
        name: str = "a",
        seed: int = 0,
    ) -> None:
        self.name, self.size, self.least = name, size, least
        self._clock, self._cost, self._limit = clock, cost, limit
        values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._values = mean + deviation * (values - values.mean())
        self.done = 0
        self.looks: list[tuple[int, float]] = []

    def extend(self, upto: int) -> int:
        assert self.done < upto <= self.size
        self._clock.now += self._cost * (upto - self.done)
        self.done = upto
        return self.done

    def measures(self, confidence: float) -> tuple[Measure, ...]:
        self.looks.append((self.done, confidence))
        values = [value[None] for value in self._values[: self.done]]
        return (Measure(self.name, "", mean_interval(values, confidence=confidence), self._limit),)

    def silence(self) -> str:
        return "it does not speak"


def verdicts(found: Evidence) -> list[Verdict | None]:
    return [measure.verdict for measure in found.measures]


def test_looks_share_the_error_of_one() -> None:
    assert sum(1 - look.confidence for look in LOOKS) == pytest.approx(1 - CONFIDENCE)
    assert [look.share for look in LOOKS] == sorted(look.share for look in LOOKS)
    assert LOOKS[-1].share == 1.0


def test_without_a_budget_all_is_measured_and_looked_at_once() -> None:
    clock = Clock()
    first, second = Normal(clock, 0.5), Normal(clock, 0.7, name="b")
    found = gather([first, second], clock=clock)
    assert (first.done, second.done) == (400, 400)
    assert first.looks == second.looks == [(400, CONFIDENCE)]
    assert verdicts(found) == [Verdict.PASS, Verdict.PASS]
    assert found.open == ()
    assert [one.seconds for one in found.spent] == [400, 400]


def test_with_a_budget_a_failure_spares_what_is_dearer() -> None:
    clock = Clock()
    first, second = Normal(clock, 2.0), Normal(clock, 0.5, name="b")
    found = gather([first, second], 1000.0, clock=clock)
    assert Verdict.FAIL in verdicts(found)
    assert (first.done, second.done) == (100, 0)  # a quarter told
    assert found.open == ()


def test_without_a_budget_a_failure_leaves_nothing_out() -> None:
    clock = Clock()
    first, second = Normal(clock, 2.0), Normal(clock, 0.5, name="b")
    assert verdicts(gather([first, second], clock=clock)) == [Verdict.FAIL, Verdict.PASS]


def test_what_is_decided_early_costs_a_quarter() -> None:
    clock = Clock()
    first, second = Normal(clock, 0.5), Normal(clock, 0.5, name="b", cost=0.1)
    found = gather([first, second], 10_000, clock=clock)
    assert (first.done, second.done) == (100, 100)
    assert {measure.confidence for measure in found.measures} == {LOOKS[0].confidence}
    assert verdicts(found) == [Verdict.PASS, Verdict.PASS]


def test_time_goes_to_what_will_be_decided_soonest() -> None:
    clock = Clock()
    # 100 units leave both open; the near one needs more of them, each as dear
    near = Normal(clock, 0.96, name="near", deviation=0.4)
    far = Normal(clock, 0.90, name="far", deviation=0.5)
    gather([near, far], 250.0, clock=clock)
    assert near.done == 100
    assert far.done > 100


def test_no_more_looks_than_planned_whatever_the_budget() -> None:
    for seconds in (30.0, 150.0, 250.0, 5000.0):
        clock = Clock()
        stream = Normal(clock, 0.99)
        gather([stream], seconds, clock=clock)
        assert len(stream.looks) <= len(LOOKS)
        assert [confidence for _, confidence in stream.looks] == [
            look.confidence for look in LOOKS[: len(stream.looks)]
        ]


@pytest.mark.parametrize("seconds", [5.0, 40.0, 130.0, 333.0])
def test_a_budget_is_kept(seconds: float) -> None:
    clock = Clock()
    streams = [Normal(clock, 0.99), Normal(clock, 0.985, name="b", cost=0.5)]
    found = gather(streams, seconds, clock=clock)
    assert clock.now - 100 <= seconds + 2  # the second stream's first units tell how dear they are
    assert len(found.open) == 2
    assert sum(one.seconds for one in found.spent) == pytest.approx(clock.now - 100)


def test_what_is_missing_is_told_in_units() -> None:
    clock = Clock()
    stream = Normal(clock, 0.98)
    found = gather([stream], clock=clock)
    (line,) = found.open
    ((wanted,),) = [[one.needed for one in found.spent]]
    assert wanted is not None
    assert line == f"a: 400 of 400 units; about {wanted} would decide it"
    half = 1.645 * 0.5 / math.sqrt(400)
    assert wanted == pytest.approx(400 * (half / 0.02) ** 2, rel=0.1)
    more = gather([Normal(clock, 0.98, size=round(wanted * 1.3))], clock=clock)
    assert verdicts(more) == [Verdict.PASS]


def test_a_stream_without_a_measure_is_open() -> None:
    clock = Clock()

    class Silent(Normal):
        def measures(self, confidence: float) -> tuple[Measure, ...]:
            return ()

    for seconds in (None, 10_000.0):
        stream = Silent(clock, 0.0)
        found = gather([stream], seconds, clock=clock)
        assert stream.done == 400
        assert found.open == ("a: 400 of 400 units; it does not speak",)


def test_a_budget_that_is_gone_before_the_second_stream() -> None:
    clock = Clock()
    first, second = Normal(clock, 0.5, cost=10.0), Normal(clock, 0.5, name="b")
    found = gather([first, second], 15.0, clock=clock)
    assert first.done == 2  # as many as it takes to know how dear they are
    assert second.done == 0
    assert found.open[1] == "b: 0 of 400 units"


def test_looking_three_times_passes_no_more_often_than_it_may() -> None:
    """At the limit itself, with noise that no test has seen: at most 5 % and a sampling error."""
    passed = failed = 0
    for seed in range(300):
        clock = Clock()
        generator = torch.Generator().manual_seed(seed)
        mean = 1.0 + 0.5 * float(torch.randn(1, generator=generator)) / math.sqrt(80)
        stream = Drifting(clock, mean, size=80, least=8, seed=seed)
        found = gather([stream], 1e6, clock=clock)
        passed += verdicts(found) == [Verdict.PASS]
        failed += verdicts(found) == [Verdict.FAIL]
    assert passed / 300 <= 0.075
    assert failed / 300 <= 0.075


class Drifting(Normal):
    """With a closed form of the interval, so that three hundred of them take a second."""

    def measures(self, confidence: float) -> tuple[Measure, ...]:
        from statistics import NormalDist

        from qinfer.evals.statistics import Interval

        values = self._values[: self.done]
        half = NormalDist().inv_cdf((1 + confidence) / 2) * 0.5 / math.sqrt(self.done)
        mean = float(values.mean())
        return (Measure(self.name, "", Interval(mean, mean - half, mean + half), self._limit),)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("600", 600), ("1.5m", 90), ("1h1m1s", 3661), (" 2M ", 120)],
)
def test_budgets_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "ten", "-5s", "10x", "5m1h", "inf"])
def test_what_is_no_budget_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="a budget is a time such as 90s, 10m or 1h30m"):
        parse_budget(text)
