"""From logits to token ids, one row per sequence: penalties, filters, one draw, log-probabilities.

A draw inverts the cumulative distribution at one uniform number per row. The caller makes that number from
(seed, position), so a row's token depends on nothing else in its batch, on no generator's state and on no
device. Filters are thresholds on a row's logits (tokens equal to the threshold stay), so their result does
not depend on how a sort orders ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUCLEUS_CANDIDATES = 1024  # top_p looks at this many first: a full sort of 49,152 takes 10 times as long


def token_counts(ids: Tensor, vocab_size: int) -> Tensor:
    """How often each token occurs: ids [R, L] int64, padded with `vocab_size` -> counts [R, V] float32."""
    counts = torch.zeros(ids.shape[0], vocab_size + 1, device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))
    return counts[:, :vocab_size]


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Logits [R, V] after the penalties [R]: repetition (Keskar et al. 2019), then frequency and presence.

    `seen` [R, V] bool: in the prompt or the output; `counts` [R, V]: in the output. A seen token's logit is
    divided by the repetition penalty where positive and multiplied where negative, once.
    """
    # 1e-38 and 1e38 bring a logit out of float32's range, and infinity times 0 is NaN
    factor = torch.where(seen, repetition.clamp(1e-20, 1e20).unsqueeze(1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(1) * counts - presence.unsqueeze(1) * (counts > 0)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [R, V] with -inf for what min_p, then top_k, then top_p leave out; never an empty row.

    top_k [R] int64, 0 = off; top_p [R], 1 = off: the smallest set of largest tokens with at least that mass;
    min_p [R], 0 = off: tokens less likely than min_p times the likeliest.
    """
    vocab_size = logits.shape[1]
    if bool((min_p > 0).any()):
        limit = logits.amax(1).double() + min_p.double().log()
        logits = logits.masked_fill(logits < _rounded_up(limit, logits.dtype).unsqueeze(1), float("-inf"))
    rows = ((top_k > 0) & (top_k < vocab_size)).nonzero().flatten()
    if len(rows):
        k = top_k[rows]
        largest = logits[rows].topk(int(k.max()), dim=1).values
        logits = _mask_below(logits, rows, largest.gather(1, k.unsqueeze(1) - 1))
    rows = (top_p < 1).nonzero().flatten()
    if len(rows):
        logits = _mask_below(logits, rows, _nucleus_limit(logits[rows], top_p[rows].unsqueeze(1)))
    return logits


def _rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The least numbers of `dtype` that are not below x [R] float64."""
    near = x.to(dtype)
    return torch.where(near < x, near.nextafter(torch.full_like(near, float("inf"))), near)


def _mask_below(logits: Tensor, rows: Tensor, limit: Tensor) -> Tensor:
    kept = logits[rows]
    return logits.index_copy(0, rows, kept.masked_fill(kept < limit, float("-inf")))


def _nucleus_limit(logits: Tensor, top_p: Tensor, candidates: int = NUCLEUS_CANDIDATES) -> Tensor:
    """The smallest logit [R, 1] that the nucleus (Holtzman et al. 2019) keeps."""
    candidates = min(candidates, logits.shape[1])
    largest = logits.topk(candidates, dim=1).values
    probs = (largest - logits.logsumexp(1, keepdim=True)).exp()
    kept = ((probs.cumsum(1) - probs) < top_p).sum(1, keepdim=True).clamp(min=1)
    limit = largest.gather(1, kept - 1)
    wider = (kept == candidates).flatten().nonzero().flatten()
    if candidates < logits.shape[1] and len(wider):
        limit[wider] = _nucleus_limit(logits[wider], top_p[wider], logits.shape[1])
    return limit


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [R, V]: its distribution inverted at uniform [R] in [0, 1) -> [R] int64."""
    mass = logits.softmax(1).cumsum(1, dtype=torch.float64)
    total = mass[:, -1:]
    # the product may round up to the total, where no token would be left
    target = torch.minimum(
        uniform.to(torch.float64).unsqueeze(1) * total, total.nextafter(torch.zeros_like(total))
    )
    return torch.searchsorted(mass, target, right=True).flatten()


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of logits [R, V] at ids [R], their ranks from 1, and the num_top largest with their ids.

    Returns [R] float32, [R] int64, [R, num_top] float32, [R, num_top] int64, largest first.
    """
    logprobs = logits.float().log_softmax(1)
    chosen = logprobs.gather(1, ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    values, tokens = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    return chosen.squeeze(1), ranks, values, tokens
