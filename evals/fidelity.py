"""How far the candidate's next-token distributions lie from the source's, token by token.

Both models read the same windows of token ids and give the logits of the whole vocabulary at every position.
Per position: KL(source || candidate) in nats; whether the most likely token is the same; and, where the text
has a next token, its negative log-likelihood under each. The KL says how much the behaviour changed, whatever
the text; the difference of the likelihoods says whether it got worse at this text.

A model is a callable here, token ids -> slices of logits in order, so that this file knows no engine. Slices
are consumed as they come: at a vocabulary of 49152 a window of 512 positions would be 100 MB per model, a
tile of 32 positions is 6 MB and stays near the processor's cache.

KL is computed as logsumexp(c) - logsumexp(s) - E_p[c - s] with p = softmax(s): identical logits give exactly
0, and no small probability is ever divided by. What is left below 0 by rounding (about 1e-6) is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.evals.gate import Limits, Measure
from qinfer.evals.statistics import Interval, exponential, mean_interval, quantile_interval

# token ids [T] -> slices [<= rows, V] float32 in order, T rows in all
Logits = Callable[[Sequence[int]], Iterator[Tensor]]
_TILE = 32  # positions


class WindowScores(NamedTuple):
    """One window of T tokens: float32 tensors on the CPU."""

    kl: Tensor  # [T] nats
    agrees: Tensor  # [T] 1.0 where the most likely token is the same
    reference_nll: Tensor  # [T - 1] nats, of the text's next token
    nll: Tensor  # [T - 1]


def compare(reference: Logits, candidate: Logits, windows: Iterable[Sequence[int]]) -> Iterator[WindowScores]:
    """Scores of every position of every window, one window at a time."""
    for token_ids in windows:
        yield _compare_window(reference, candidate, token_ids)


def measures(scores: Sequence[WindowScores], limits: Limits, *, seed: int = 0) -> tuple[Measure, ...]:
    """The measures that the gate judges, then those it reports, with intervals over windows.

    Where a position gave NaN or infinity, how many did comes first.
    """
    kl = [window.kl for window in scores]
    difference = [window.nll - window.reference_nll for window in scores]
    broken = float(sum(int((~torch.isfinite(window.kl)).sum()) for window in scores))
    alarm = Measure("positions without a number", "", Interval(broken, broken, broken), 0.0)
    agreement = mean_interval([window.agrees for window in scores], seed=seed)
    ratio = mean_interval(difference, seed=seed).map(exponential)
    ours, theirs = (
        mean_interval(nll, seed=seed).map(exponential)
        for nll in ([w.nll for w in scores], [w.reference_nll for w in scores])
    )
    return (
        *([alarm] if broken else []),
        Measure("mean KL", "nats/token", mean_interval(kl, seed=seed), limits.mean_kl),
        Measure("p99 KL", "nats", quantile_interval(kl, 0.99, seed=seed), limits.p99_kl),
        Measure("top-1 agreement", "of positions", agreement, 1 - limits.disagreement, "at least"),
        Measure("perplexity ratio", "", ratio, 1 + limits.perplexity_excess),
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


def _compare_window(reference: Logits, candidate: Logits, token_ids: Sequence[int]) -> WindowScores:
    targets = torch.tensor([*token_ids[1:], 0])  # the last position has no next token; its score is dropped
    scores = []
    start = 0
    for ours, theirs in _aligned(reference(token_ids), candidate(token_ids)):
        stop = start + len(ours)
        scores.append(_score(ours, theirs, targets[start:stop].to(ours.device)).cpu())
        start = stop
    assert start == len(token_ids), f"logits of {start} positions for {len(token_ids)} tokens"
    kl, agrees, reference_nll, nll = torch.cat(scores, 1)
    return WindowScores(kl, agrees, reference_nll[:-1], nll[:-1])


def _score(reference: Tensor, candidate: Tensor, targets: Tensor) -> Tensor:
    """[4, rows]: kl, agreement, and both likelihoods of `targets`, from logits [rows, V]."""
    reference_total, total = reference.logsumexp(-1), candidate.logsumexp(-1)
    moved = torch.linalg.vecdot(reference.softmax(-1), candidate - reference)
    kl = (total - reference_total - moved).clamp(min=0)  # clamp keeps NaN
    agrees = (reference.argmax(-1) == candidate.argmax(-1)).float()
    agrees = torch.where(kl.isnan(), torch.nan, agrees)  # argmax finds the NaN in both and calls it agreement
    rows = targets[:, None]
    reference_nll = reference_total - reference.gather(1, rows)[:, 0]
    nll = total - candidate.gather(1, rows)[:, 0]
    return torch.stack([kl, agrees, reference_nll, nll])


def _aligned(first: Iterator[Tensor], second: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles of equal rows from two streams that may be sliced differently; the streams must end together."""
    for ours, theirs in zip(_tiles(first), _tiles(second), strict=True):
        assert ours.shape == theirs.shape, f"logits {tuple(ours.shape)} against {tuple(theirs.shape)}"
        yield ours, theirs


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
