"""Two models on the same questions: what was lost, what was won, and whether it is little enough.

Accuracies of two models differ by less than either is known to, since most questions are answered alike. What
counts are the *flips*, the questions that one got right and the other wrong: of them McNemar's exact test
says whether losses outnumber wins by chance, and from them comes the interval of the difference. It is a
bootstrap over questions, over passages where questions share one, within each task.

*Recovery* is the candidate's accuracy above chance as a share of the source's. Blind guessing is worth
nothing, so a task on which the source itself is no better than chance says nothing and is left out of the
pool; which ones those are is decided by the source's answers alone.

A sample without a single flip does not prove that there are none: half a loss and half a win are added to
what is drawn from (Agresti and Min 2005), so that no interval is narrower than its questions allow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch

from qinfer.evals.answers import Pair, generation_measures
from qinfer.evals.gate import POWER, Measure
from qinfer.evals.statistics import CONFIDENCE, RESAMPLES, Interval, finite, multinomial, percentiles

_MIN_ITEMS = 20  # of a task: fewer cannot show that the source is better than chance
# columns of the sums over a cluster: questions, right answers of both, those of chance, flips
_N, _SOURCE, _CANDIDATE, _CHANCE, _FLIPS = range(5)


class Pooled(NamedTuple):
    """What the questions of several tasks say together."""

    recovery: Interval
    difference: Interval  # of the accuracies
    flips: Interval  # share of the questions
    source: Interval
    candidate: Interval


class TaskResult(NamedTuple):
    """One task that has right and wrong answers, asked of both models."""

    task: str
    kind: str
    metric: str
    items: int
    clusters: int
    chance: float
    source: float  # accuracy
    candidate: float
    lost: int  # questions that only the source got right
    won: int  # that only the candidate got right
    difference: Interval  # of the accuracies
    counts: bool  # whether the source is better than chance, so that it is in the pool

    @property
    def p_value(self) -> float:
        """Of McNemar's exact test: how often chance alone makes losses and wins so unequal."""
        return mcnemar(self.lost, self.won)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        bounds = {key: finite(number) for key, number in self.difference._asdict().items()}
        recovery = _share(self.candidate - self.chance, self.source - self.chance)
        return {
            **self._asdict(),
            "difference": bounds,
            "flips": (self.lost + self.won) / self.items,
            "p_value": self.p_value,
            "recovery": finite(recovery) if self.counts else None,
        }


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p of McNemar's exact test: `lost` of `lost + won` tosses of a fair coin, or fewer."""
    n, tail = lost + won, min(lost, won)
    return float(min(1.0, 2 * sum(math.comb(n, k) for k in range(tail + 1)) / 2**n))


def task_results(pairs: Sequence[Pair], *, seed: int = 0, confidence: float = CONFIDENCE) -> list[TaskResult]:
    """Each task's result, in the order of their first questions; of tasks that have right and wrong."""
    return [
        _task_result(task, of_task, seed, confidence)
        for task, of_task in _by_task(pairs).items()
        if of_task[0][0].correct is not None
    ]


def pool(pairs: Sequence[Pair], *, seed: int = 0, confidence: float = CONFIDENCE) -> Pooled | None:
    """All questions of the tasks that count, together; None where there is no such task."""
    strata = [
        _clusters(of_task)
        for of_task in _by_task(pairs).values()
        if of_task[0][0].correct is not None and _counts(of_task)
    ]
    if not strata:
        return None
    sums = sum(rows.sum(0) for rows in strata)
    drawn, num_clusters = _drawn(strata, seed), sum(map(len, strata))

    def interval(top: np.ndarray, bottom: np.ndarray) -> Interval:
        value = _share(float(sums @ top), float(sums @ bottom))
        below = drawn @ bottom
        if num_clusters < 2 or bool((below <= 0).any()):
            return Interval(value, -math.inf, math.inf)
        shares = torch.from_numpy(drawn @ top / below)
        return percentiles(value, shares, num_clusters, confidence)

    unit = np.eye(5)
    above = [unit[who] - unit[_CHANCE] for who in (_SOURCE, _CANDIDATE)]
    return Pooled(
        recovery=interval(above[1], above[0]),
        difference=interval(unit[_CANDIDATE] - unit[_SOURCE], unit[_N]),
        flips=interval(unit[_FLIPS], unit[_N]),
        source=interval(unit[_SOURCE], unit[_N]),
        candidate=interval(unit[_CANDIDATE], unit[_N]),
    )


def measures(
    pairs: Sequence[Pair], accuracy_lost: float, *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[Measure, ...]:
    """The measure that the gate judges, recovery over all tasks that count, then those it reports."""
    pooled = pool(pairs, seed=seed, confidence=confidence)
    if pooled is None:
        return ()
    above = "of the source's accuracy above chance"
    return (
        Measure("recovery on tasks", above, pooled.recovery, 1 - accuracy_lost, "at least"),
        Measure("accuracy difference", "", pooled.difference),
        Measure("flips", "of answers", pooled.flips),
        Measure("accuracy of the candidate", "", pooled.candidate),
        Measure("accuracy of the source", "", pooled.source),
        *generation_measures(pairs, seed=seed, confidence=confidence),
    )


def needed(measure: Measure, units: int) -> int | None:
    """Units (questions, windows) in all that would decide the measure if its value stayed; None: never.

    An interval shrinks with the square root of what is measured; the bound that has to come to the limit is
    the one on its side of the value.
    """
    value, low, high = measure.interval
    if measure.limit is None or not math.isfinite(value):
        return None
    gap = measure.limit - value
    reach = high - value if gap > 0 else value - low
    if gap == 0 or not math.isfinite(reach):
        return None
    return max(math.ceil(units * (reach / gap) ** 2), 1)


def questions_to_plan(flip_rate: float, margin: float, *, confidence: float = CONFIDENCE) -> int:
    """Questions that show a true difference of zero to be within `margin` with probability 0.8.

    (z(0.95) + z(0.8))^2 f / margin^2, about 6.2 f / margin^2 (Miller 2024 for paired questions).
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2) + NormalDist().inv_cdf(POWER)
    return math.ceil(z**2 * flip_rate / margin**2)


def _task_result(task: str, pairs: Sequence[Pair], seed: int, confidence: float) -> TaskResult:
    rows = _clusters(pairs)
    n, source, candidate, chance, _ = rows.sum(0).tolist()
    drawn = _drawn([rows], seed)
    difference = Interval((candidate - source) / n, -math.inf, math.inf)
    if len(rows) > 1:
        shares = torch.from_numpy((drawn[:, _CANDIDATE] - drawn[:, _SOURCE]) / drawn[:, _N])
        difference = percentiles(difference.value, shares, len(rows), confidence)
    first = pairs[0][0]
    return TaskResult(
        task=task,
        kind=first.kind,
        metric=first.metric,
        items=len(pairs),
        clusters=len(rows),
        chance=chance / n,
        source=source / n,
        candidate=candidate / n,
        lost=sum(bool(a.correct) and not b.correct for a, b in pairs),
        won=sum(bool(b.correct) and not a.correct for a, b in pairs),
        difference=difference,
        counts=_counts(pairs),
    )


def _counts(pairs: Sequence[Pair]) -> bool:
    """Whether the source is better than chance, by a one-sided bound of 95 % over its questions."""
    n = len(pairs)
    accuracy = sum(bool(item.correct) for item, _ in pairs) / n
    chance = sum(item.chance for item, _ in pairs) / n
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    smoothed = (accuracy * n + 1) / (n + 2)  # no certainty of an accuracy of 1
    return n >= _MIN_ITEMS and accuracy - z * math.sqrt(smoothed * (1 - smoothed) / n) > chance


def _by_task(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        found[pair[0].task].append(pair)
    return found


def _clusters(pairs: Sequence[Pair]) -> np.ndarray:
    """[clusters, 5] sums; a question without a passage is a cluster of its own."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(5))
    for item, answer in pairs:
        ours, theirs = bool(item.correct), bool(answer.correct)
        name = f"c {item.cluster}" if item.cluster else f"i {item.item_id}"
        sums[name] += (1, ours, theirs, item.chance, ours != theirs)
    return np.array(list(sums.values()))


def _drawn(strata: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Sums over clusters drawn anew within each task, [RESAMPLES, 5], half a loss and half a win added."""
    total = np.zeros((RESAMPLES, 5))
    num_clusters = sum(map(len, strata))
    for i, rows in enumerate(strata):
        distinct, counts = np.unique(rows, axis=0, return_counts=True)
        chance = rows[:, _CHANCE].sum() / rows[:, _N].sum()
        flipped = [(1, 1, 0, chance, 1), (1, 0, 1, chance, 1)]
        weights = np.concatenate([counts, [0.5 * len(rows) / num_clusters] * 2])
        drawn = multinomial(len(rows), weights / weights.sum(), seed + i)
        total += drawn @ np.concatenate([distinct, flipped])
    return total


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
