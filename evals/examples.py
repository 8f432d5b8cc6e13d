"""What a person wants to see of a comparison: where the candidate went another way, with both answers.

Of tasks the questions that only the source got right, those first where the candidate's answer moved most:
for choices by how much further the right one fell behind the best of the others. Of the text the position of
each window where the distributions differ most, with what both models held likeliest there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qinfer.evals.answers import Pair
from qinfer.evals.fidelity import WindowScores
from qinfer.evals.items import Item
from qinfer.evals.statistics import finite

MOST = 12  # of each kind
_PER_TASK = 4
_CONTEXT = 60  # tokens before a position
_PROMPT = 2000  # characters of a prompt's end

Decode = Callable[[Sequence[int]], str]


def regressions(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Questions that only the source got right, JSON-ready: at most MOST, and few of one task."""
    lost = [(ours, theirs) for ours, theirs in pairs if ours.correct and theirs.correct is False]
    lost.sort(key=lambda both: _margin(both[0]) - _margin(both[1]), reverse=True)
    taken: Counter[str] = Counter()
    found: list[dict[str, Any]] = []
    for ours, theirs in lost:
        taken[ours.task] += 1
        if taken[ours.task] <= _PER_TASK and len(found) < MOST:
            found.append(_regression(ours, theirs))
    return found


def moved(
    windows: Sequence[Sequence[int]], scores: Sequence[WindowScores], decode: Decode
) -> list[dict[str, Any]]:
    """The positions of greatest KL, one a window, JSON-ready: at most MOST, the greatest first."""
    order = sorted(range(len(scores)), key=lambda i: _greatest(scores[i]), reverse=True)
    return [_moved(i, windows[i], scores[i], decode) for i in order[:MOST]]


def kl_quantiles(scores: Sequence[WindowScores]) -> list[tuple[float, float]]:
    """(share of positions, KL that they do not exceed), for a curve; none where a position has no number."""
    kl = torch.cat([window.kl for window in scores]).double() if scores else torch.empty(0)
    if not len(kl) or not bool(kl.isfinite().all()):
        return []
    shares = torch.linspace(0, 1, 101, dtype=torch.float64)
    places = (shares * (len(kl) - 1)).round().long()
    return list(zip(shares.tolist(), kl.sort().values[places].tolist(), strict=True))


def _regression(ours: Item, theirs: Item) -> dict[str, Any]:
    return {
        "task": ours.task,
        "question": ours.item_id,
        "prompt": ours.prompt[-_PROMPT:],
        "prompt_of_candidate": None if theirs.prompt == ours.prompt else theirs.prompt[-_PROMPT:],
        "target": ours.target,
        "source": _answer(ours),
        "candidate": _answer(theirs),
        "choices": [
            {"text": choice, "source": finite(a), "candidate": finite(b)}
            for choice, a, b in zip(ours.choices, ours.logliks, theirs.logliks, strict=False)
        ],
    }


def _answer(item: Item) -> str:
    if item.kind == "loglikelihood":
        return item.answer or "(something else)"
    return item.answer


def _margin(item: Item) -> float:
    """Nats by which the right choice leads; for a free answer only whether it is right."""
    if item.target not in item.choices or len(item.choices) < 2:
        return float(bool(item.correct))
    right = item.choices.index(item.target)
    return item.logliks[right] - max(one for i, one in enumerate(item.logliks) if i != right)


def _greatest(scores: WindowScores) -> float:
    """NaN counts as more than anything."""
    return float(scores.kl.nan_to_num(float("inf")).max())


def _moved(index: int, window: Sequence[int], scores: WindowScores, decode: Decode) -> dict[str, Any]:
    position = int(scores.kl.nan_to_num(float("inf")).argmax())
    likeliest = [
        [
            {"token": decode([token]), "probability": finite(probability)}
            for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        for ids, probabilities in zip(scores.top_ids, scores.top_probabilities, strict=True)
    ]
    following = window[position + 1 : position + 2]
    return {
        "window": index,
        "position": position,
        "kl": finite(float(scores.kl[position])),
        "context": decode(window[max(0, position + 1 - _CONTEXT) : position + 1]),
        "next": decode(following) if following else None,
        "source": likeliest[0],
        "candidate": likeliest[1],
    }
