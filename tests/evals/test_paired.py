"""Flips, McNemar, recovery above chance and their intervals, against closed forms and by simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from qinfer.evals.answers import Pair
from qinfer.evals.gate import Measure, Verdict
from qinfer.evals.items import Generated, Item
from qinfer.evals.paired import mcnemar, measures, needed, pool, questions_to_plan, task_results
from qinfer.evals.statistics import Interval


def item(
    item_id: int,
    correct: bool | None,
    *,
    task: str = "t",
    chance: float = 0.25,
    cluster: str = "",
    generated: Generated | None = None,
) -> Item:
    choices = ("a", "b", "c", "d")
    return Item(
        task=task,
        item_id=item_id,
        kind="choice",
        doc_digest=f"{task} {item_id}",
        prompt="?",
        choices=choices,
        logliks=(-1.0, -2.0, -3.0, -4.0),
        target="a",
        answer="a" if correct else "b",
        metric="acc",
        correct=correct,
        scores={},
        chance=chance,
        cluster=cluster,
        generated=generated,
    )


def pairs(source: Sequence[bool], candidate: Sequence[bool], **options: object) -> list[Pair]:
    return [
        (item(i, a, **options), item(i, b, **options))
        for i, (a, b) in enumerate(zip(source, candidate, strict=True))
    ]


def answers(both: int, lost: int, won: int, neither: int) -> list[Pair]:
    outcomes = [(True, True)] * both + [(True, False)] * lost + [(False, True)] * won
    outcomes += [(False, False)] * neither
    return pairs([a for a, _ in outcomes], [b for _, b in outcomes])


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (9, 1, 22 / 1024), (1, 9, 22 / 1024), (4, 4, 1.0)],
)
def test_mcnemar_is_the_exact_binomial_test(lost: int, won: int, p: float) -> None:
    assert mcnemar(lost, won) == pytest.approx(p, abs=1e-12)


def test_mcnemar_of_many_flips_is_the_normal_one() -> None:
    z = (1040 - 960 - 1) / math.sqrt(2000)  # with the correction for continuity
    assert mcnemar(1040, 960) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)


def test_one_task_in_figures() -> None:
    (result,) = task_results(answers(both=50, lost=8, won=2, neither=40))
    assert (result.items, result.lost, result.won) == (100, 8, 2)
    assert (result.source, result.candidate, result.chance) == (0.58, 0.52, 0.25)
    assert result.difference.value == pytest.approx(-0.06)
    assert result.p_value == pytest.approx(112 / 1024)
    document = result.to_dict()
    assert document["flips"] == 0.10
    assert document["recovery"] == pytest.approx(0.27 / 0.33)


def test_the_interval_of_the_difference_is_that_of_paired_questions() -> None:
    """SE = sqrt((f - d^2) / n): that of the flips, far below that of two separate samples."""
    found = pool(answers(both=900, lost=60, won=40, neither=500))
    assert found is not None
    n, f, d = 1500, 100 / 1500, -20 / 1500
    assert found.difference.value == pytest.approx(d)
    half = 1.645 * math.sqrt((f - d * d) / n)
    assert found.difference.high - found.difference.value == pytest.approx(half, rel=0.06)
    assert found.difference.value - found.difference.low == pytest.approx(half, rel=0.06)
    assert found.flips.value == pytest.approx(f)


def test_recovery_is_pooled_above_chance_and_leaves_guessing_out() -> None:
    good = pairs([True] * 60 + [False] * 40, [True] * 55 + [False] * 45, task="good", chance=0.2)
    other = pairs([True] * 30 + [False] * 20, [True] * 30 + [False] * 20, task="other", chance=0.5)
    guessed = pairs([True] * 26 + [False] * 74, [False] * 100, task="guessed", chance=0.25)
    few = pairs([True] * 19, [False] * 19, task="few", chance=0.0)
    assert [result.counts for result in task_results([*good, *guessed, *few])] == [True, False, False]
    found = pool([*good, *guessed, *few])
    assert found is not None
    assert found.recovery.value == pytest.approx(35 / 40)
    assert pool([*guessed, *few]) is None
    assert measures([*guessed, *few], 0.1) == ()
    both = pool([*good, *other])
    assert both is not None
    assert not task_results(other)[0].counts  # 60 % of 50 questions may be guessing where it gets half
    assert both.recovery.value == found.recovery.value


def test_a_task_that_counts_is_so_by_the_source_alone() -> None:
    source = [True] * 60 + [False] * 40
    for candidate in ([True] * 100, [False] * 100):
        (result,) = task_results(pairs(source, candidate))
        assert result.counts


def test_questions_that_share_a_passage_are_one() -> None:
    rng = random.Random(1)
    draws = [(rng.random() < 0.7, rng.random() < 0.65) for _ in range(60)]
    alone = pairs([a for a, _ in draws], [b for _, b in draws])
    shared: list[Pair] = [
        (item(10 * i + k, a, cluster=f"p{i}"), item(10 * i + k, b, cluster=f"p{i}"))
        for i, (a, b) in enumerate(draws)
        for k in range(10)
    ]
    one, ten = pool(alone), pool(shared)
    assert one is not None
    assert ten is not None
    width = [found.difference.high - found.difference.low for found in (one, ten)]
    assert width[1] == pytest.approx(width[0], rel=0.1)
    apart = pool([(item(i, a.correct), item(i, b.correct)) for i, (a, b) in enumerate(shared)])
    assert apart is not None
    assert apart.difference.high - apart.difference.low < 0.4 * width[1]


@pytest.mark.parametrize(("questions", "passes"), [(30, False), (150, False), (1000, True)])
def test_no_flip_at_all_is_no_proof_when_questions_are_few(questions: int, passes: bool) -> None:
    found = measures(answers(both=questions * 3 // 4, lost=0, won=0, neither=questions // 4), 0.01)[0]
    assert found.interval.value == 1.0
    assert (found.verdict is Verdict.PASS) is passes
    assert found.verdict is not Verdict.FAIL


def simulated(trials: int, questions: int, lost: float, won: float) -> list[Verdict | None]:
    verdicts = []
    for trial in range(trials):
        rng = random.Random(trial)
        draws = [rng.random() for _ in range(questions)]
        source = [x < 0.7 for x in draws]
        candidate = [(x < 0.7 and x >= lost) or 1 - won <= x for x in draws]
        found = measures(pairs(source, candidate, chance=0.0), 0.05, seed=trial)
        verdicts.append(found[0].verdict)
    return verdicts


def test_a_candidate_at_the_limit_passes_and_fails_as_rarely_as_it_should() -> None:
    # 0.7 x 0.05 = 0.035 is the limit; flips of 5.5 % in all
    verdicts = simulated(100, 800, lost=0.045, won=0.010)
    assert verdicts.count(Verdict.PASS) / 100 <= 0.09
    assert verdicts.count(Verdict.FAIL) / 100 <= 0.09


def test_an_equal_candidate_passes_with_the_planned_number_of_questions() -> None:
    questions = questions_to_plan(0.04, 0.035)
    verdicts = simulated(80, questions, lost=0.02, won=0.02)
    assert verdicts.count(Verdict.PASS) / 80 == pytest.approx(0.8, abs=0.12)


@pytest.mark.parametrize(
    ("flips", "margin", "questions"),
    [(0.02, 0.005, 4950), (0.02, 0.01, 1240), (0.05, 0.01, 3090), (0.10, 0.03, 690)],
)
def test_questions_to_plan_against_the_published_table(flips: float, margin: float, questions: int) -> None:
    assert questions_to_plan(flips, margin) == pytest.approx(questions, rel=0.01)


@pytest.mark.parametrize(
    ("interval", "bound", "wanted"),
    [
        (Interval(0.980, 0.960, 1.010), "at least", 1600),  # 0.02 must shrink to 0.005
        (Interval(0.965, 0.950, 0.985), "at least", 400),  # failing: 0.02 above must shrink to 0.01
        (Interval(0.970, 0.9, 1.0), "at most", 3600),
        (Interval(0.980, 0.9, 1.0), "at most", 25600),
    ],
)
def test_how_many_more_would_decide(interval: Interval, bound: str, wanted: int) -> None:
    measure = Measure("m", "", interval, 0.975, bound)
    assert needed(measure, 100) == pytest.approx(wanted, abs=1)


def test_what_nothing_would_decide() -> None:
    at_limit = Measure("m", "", Interval(0.5, 0.4, 0.6), 0.5)
    unbounded = Measure("m", "", Interval(0.4, -math.inf, math.inf), 0.5)
    reported = Measure("m", "", Interval(0.4, 0.3, 0.5))
    assert [needed(measure, 100) for measure in (at_limit, unbounded, reported)] == [None] * 3


def made(tokens: int, finish: str, repetition: float) -> Generated:
    return Generated(tokens, finish, repetition)


def answered(change: Callable[[int], tuple[Generated, Generated]]) -> dict[str, float]:
    both = [change(i) for i in range(40)]
    pairs_made = [(item(i, True, generated=a), item(i, True, generated=b)) for i, (a, b) in enumerate(both)]
    return {measure.name: measure.interval.value for measure in measures(pairs_made, 0.1)}


def test_free_answers_that_repeat_end_early_or_never() -> None:
    usual = made(30, "eos", 0.1)
    early = answered(lambda i: (usual, made(9, "eos", 0.0) if i < 10 else usual))
    assert early["change of answers ended early"] == pytest.approx(0.25)
    assert early["change of answers cut off"] == 0
    looping = answered(lambda i: (usual, made(200, "length", 0.9) if i < 20 else usual))
    assert looping["change of answers cut off"] == pytest.approx(0.5)
    assert looping["change of repetition"] == pytest.approx(0.4)
    assert looping["change of answers ended early"] == pytest.approx(-0.5)  # the source ends, it does not
    assert "change of repetition" not in {m.name for m in measures(answers(40, 2, 2, 4), 0.1)}


def test_equal_seeds_give_equal_intervals() -> None:
    asked = answers(both=60, lost=6, won=4, neither=30)
    assert pool(asked, seed=3) == pool(asked, seed=3)
    assert pool(asked, seed=3) != pool(asked, seed=4)
    narrow, wide = pool(asked, confidence=0.9), pool(asked, confidence=0.99)
    assert narrow is not None
    assert wide is not None
    assert wide.recovery.low < narrow.recovery.low
