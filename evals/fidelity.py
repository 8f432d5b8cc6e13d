"""How far the candidate's next-token distributions lie from the source's, token by token.

Both models read the same windows of token ids and give the logits of the whole vocabulary at every position.
Per position: KL(source || candidate) in nats; whether the most likely token is the same; and, where the text
has a next token, its negative log-likelihood under each. The KL says how much the behaviour changed, whatever
the text; the difference of the likelihoods says whether it got worse at this text.

A model is a callable here, token ids -> slices of logits in order, so that this file knows no engine. Slices
are consumed as they come: at a vocabulary of 49152 a window of 512 positions would be 100 MB per model, a
tile of 16 positions is 3 MB and stays near the processor's cache.

KL is computed as logsumexp(c) - logsumexp(s) - E_p[c - s] with p = softmax(s): identical logits give exactly
0, and no small probability is ever divided by. What is left below 0 by rounding (about 1e-6) is 0. One pass
of exp over a row serves its logsumexp and its softmax, a sixth of what torch's own two take on a CPU.

Of the position that moved most the likeliest tokens are kept, so that a report can show what was said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.evals.gate import Measure
from qinfer.evals.statistics import CONFIDENCE, Interval, exponential, mean_interval, quantile_interval
from qinfer.evals.thresholds import Limits

# token ids [T] -> slices [<= rows, V] in order, T rows in all; float32, or narrower and widened tile by tile
Logits = Callable[[Sequence[int]], Iterator[Tensor]]
_TILE = 16  # positions
TOP = 5  # likeliest tokens that are kept of the position that moved most


class WindowScores(NamedTuple):
    """One window of T tokens: float32 tensors (`top_ids` int64) on the CPU."""

    kl: Tensor  # [T] nats
    agrees: Tensor  # [T] 1.0 where the most likely token is the same
    reference_nll: Tensor  # [T - 1] nats, of the text's next token
    nll: Tensor  # [T - 1]
    top_ids: Tensor  # [2, TOP] at the position of the greatest KL: the source's, the candidate's
    top_probabilities: Tensor  # [2, TOP]


def compare(reference: Logits, candidate: Logits, windows: Iterable[Sequence[int]]) -> Iterator[WindowScores]:
    """Scores of every position of every window, one window at a time."""
    for token_ids in windows:
        yield _compare_window(reference, candidate, token_ids)


def measures(
    scores: Sequence[WindowScores], limits: Limits, *, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[Measure, ...]:
    """The measures that the gate judges, then those it reports, with intervals over windows.

    Where a position gave NaN or infinity, how many did comes first.
    """
    mean = partial(mean_interval, seed=seed, confidence=confidence)
    kl = [window.kl for window in scores]
    broken = float(sum(int((~torch.isfinite(window.kl)).sum()) for window in scores))
    alarm = Measure("positions without a number", "", Interval(broken, broken, broken), 0.0)
    agreement = mean([window.agrees for window in scores])
    difference = mean([window.nll - window.reference_nll for window in scores])
    moved = mean([(torch.exp(-w.nll) - torch.exp(-w.reference_nll)).square() for w in scores]).map(_root)
    ours, theirs = (
        mean(nll).map(exponential) for nll in ([w.nll for w in scores], [w.reference_nll for w in scores])
    )
    p99 = quantile_interval(kl, 0.99, seed=seed, confidence=confidence)
    return (
        *([alarm] if broken else []),
        Measure("mean KL", "nats/token", mean(kl), limits.mean_kl),
        Measure("p99 KL", "nats", p99, limits.p99_kl),
        Measure("top-1 agreement", "of positions", agreement, 1 - limits.disagreement, "at least"),
        Measure("perplexity ratio", "", difference.map(exponential), 1 + limits.perplexity_excess),
        Measure("NLL difference", "nats/token", difference),
        Measure("RMS change of the true token's probability", "", moved),
        Measure("perplexity of the candidate", "per token", ours),
        Measure("perplexity of the source", "per token", theirs),
    )


def noise_floor(scores: Sequence[WindowScores], *, seed: int = 0) -> tuple[Measure, ...]:
    """What the serving dtype alone changes, from the source in that dtype against the reference: reported."""
    kl = mean_interval([window.kl for window in scores], seed=seed)
    agreement = mean_interval([window.agrees for window in scores], seed=seed)
    return (
        Measure("noise floor: mean KL", "nats/token", kl),
        Measure("noise floor: top-1 agreement", "of positions", agreement),
    )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else -math.inf  # an unbounded interval begins at -inf


def _compare_window(reference: Logits, candidate: Logits, token_ids: Sequence[int]) -> WindowScores:
    targets = torch.tensor([*token_ids[1:], 0])  # the last position has no next token; its score is dropped
    scores: list[Tensor] = []
    start, furthest = 0, -1.0
    tops: tuple[Tensor, Tensor] | None = None
    for ours, theirs in _aligned(reference(token_ids), candidate(token_ids)):
        stop = start + len(ours)
        scores.append(_score(ours, theirs, targets[start:stop].to(ours.device)).cpu())
        row = int(scores[-1][0].argmax())  # which finds NaN first, and infinity next
        moved = float(scores[-1][0, row].nan_to_num(math.inf))
        if moved > furthest:
            furthest, tops = moved, (ours[row].clone(), theirs[row].clone())
        start = stop
    assert start == len(token_ids), f"logits of {start} positions for {len(token_ids)} tokens"
    assert tops is not None
    kl, agrees, reference_nll, nll = torch.cat(scores, 1)
    likeliest = torch.stack(tops).softmax(-1).topk(min(TOP, len(tops[0])))
    return WindowScores(
        kl, agrees, reference_nll[:-1], nll[:-1], likeliest.indices.cpu(), likeliest.values.cpu()
    )


def _score(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tensor:
    """[4, rows]: kl, agreement, and both likelihoods of `targets`, from logits [rows, V]."""
    top, ours = reference.max(-1, keepdim=True)
    candidate_top, theirs = candidate.max(-1, keepdim=True)
    weights = torch.sub(reference, top).exp_()
    total = weights.sum(-1)
    moved = torch.linalg.vecdot(weights, candidate - reference) / total
    reference_total = top[:, 0] + total.log()
    torch.sub(candidate, candidate_top, out=weights).exp_()
    candidate_total = candidate_top[:, 0] + weights.sum(-1).log()
    kl = (candidate_total - reference_total - moved).clamp(min=0)  # clamp keeps NaN
    agrees = (ours == theirs)[:, 0].float()
    agrees = torch.where(kl.isnan(), torch.nan, agrees)  # max finds the NaN in both and calls it agreement
    rows = targets[:, None]
    reference_nll = reference_total - reference.gather(1, rows)[:, 0]
    nll = candidate_total - candidate.gather(1, rows)[:, 0]
    return torch.stack([kl, agrees, reference_nll, nll])


def _aligned(first: Iterator[Tensor], second: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles of equal rows from two streams that may be sliced differently; the streams must end together."""
    for ours, theirs in zip(_tiles(first), _tiles(second), strict=True):
        assert ours.shape == theirs.shape, f"logits {tuple(ours.shape)} against {tuple(theirs.shape)}"
        yield ours.float(), theirs.float()


def _tiles(slices: Iterator[Tensor]) -> Iterator[Tensor]:
    """The same rows in tiles of _TILE, the last one shorter."""
    kept: Tensor | None = None
    for part in slices:
        rows = part if kept is None else torch.cat([kept, part])
        whole = len(rows) // _TILE * _TILE
        yield from torch.split(rows[:whole], _TILE) if whole else ()
        kept = rows[whole:] if whole < len(rows) else None
    if kept is not None:
        yield kept
