"""How free answers of two models differ beside being right: repeated, cut off, or ended too early.

A damaged model may keep its accuracy on short answers and lose its thread in long ones: it says the same
again, never comes to an end, or ends before it has answered. Each is a rate of the candidate's answers less
the same rate of the source's, to the same prompts; above zero is worse.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from qinfer.evals.gate import Measure
from qinfer.evals.items import Generated, Item
from qinfer.evals.statistics import CONFIDENCE, Interval, multinomial, percentiles

Pair = tuple[Item, Item]  # the source's record of a question, the candidate's


def generation_measures(
    pairs: Sequence[Pair], *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[Measure, ...]:
    """Changes of three rates, with intervals over questions or the passages they share; none without text."""
    changes: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in _CHANGES}
    for item, answer in pairs:
        if item.generated is None or answer.generated is None:
            continue
        cluster = f"c {item.cluster}" if item.cluster else f"{item.task} {item.item_id}"
        for name, change in _CHANGES.items():
            changes[name][cluster].append(change(item.generated, answer.generated))
    return tuple(
        Measure(name, "", _mean(list(clusters.values()), seed, confidence))
        for name, clusters in changes.items()
        if clusters
    )


def _repetition(source: Generated, candidate: Generated) -> float:
    return candidate.repetition - source.repetition


def _cut_off(source: Generated, candidate: Generated) -> float:
    return float(candidate.finish == "length") - float(source.finish == "length")


def _ended_early(source: Generated, candidate: Generated) -> float:
    return float(_early(candidate, source)) - float(_early(source, candidate))


_CHANGES = {
    "change of repetition": _repetition,
    "change of answers cut off": _cut_off,
    "change of answers ended early": _ended_early,
}


def _early(answer: Generated, other: Generated) -> bool:
    """Whether it ended of itself with less than half of the other's tokens."""
    return answer.finish == "eos" and 2 * answer.num_tokens < other.num_tokens


def _mean(clusters: Sequence[Sequence[float]], seed: int, confidence: float) -> Interval:
    """Mean over all values; a sample in which nothing changed has an interval without width."""
    rows = np.array([(len(values), sum(values)) for values in clusters])
    count, total = rows.sum(0)
    if len(rows) < 2:
        return Interval(float(total / count), -math.inf, math.inf)
    distinct, counts = np.unique(rows, axis=0, return_counts=True)
    drawn = multinomial(len(rows), counts / len(rows), seed) @ distinct
    return percentiles(
        float(total / count), torch.from_numpy(drawn[:, 1] / drawn[:, 0]), len(rows), confidence
    )
