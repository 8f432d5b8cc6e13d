"""From logits to tokens: penalties, filters, the draw, and what to tell."""

from __future__ import annotations

from torch import Tensor

from qinfer import backend
from qinfer.kernels import fused_sampling as _fused_sampling
from qinfer.kernels import sampling as _sampling


def token_counts(ids: Tensor, vocab_size: int) -> Tensor:
    """ids [R, L] int64, padded with vocab_size -> how often each token occurs, [R, V] float32."""
    return _sampling.token_counts(ids, vocab_size)


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """logits, seen (bool), counts [R, V]; penalties [R] -> logits [R, V]."""
    if logits.is_cuda:
        return backend.run(_sampling.apply_penalties, logits, seen, counts, repetition, frequency, presence)
    return _sampling.apply_penalties(logits, seen, counts, repetition, frequency, presence)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [R, V], limits [R] -> logits with -inf for what min_p, top_k and top_p leave out."""
    if logits.is_cuda:
        return backend.run(_sampling.filter_logits, logits, top_k, top_p, min_p)
    return _sampling.filter_logits(logits, top_k, top_p, min_p)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [R, V], decided by uniform [R] float64 in [0, 1) -> [R] int64."""
    if logits.is_cuda:
        return backend.run(_sampling.draw, logits, uniform)
    return _sampling.draw(logits, uniform)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits [R, V], the first of equals -> [R] int64; -1 for NaN."""
    if logits.is_cuda:
        return backend.run(_fused_sampling.greedy, logits)
    return _fused_sampling.greedy(logits)


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """One token per row of logits [R, V] -> [R] int64, -1 for NaN; temperature 0 is greedy.

    uniform [R] float64 in [0, 1) decides; limits [R] as in `filter_logits`, None where no row has any.
    """
    if logits.is_cuda:
        return backend.run(_fused_sampling.sample, logits, uniform, temperature, top_k, top_p, min_p)
    return _fused_sampling.sample(logits, uniform, temperature, top_k, top_p, min_p)


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of logits [R, V] at ids [R], ranks from 1, the num_top largest and their ids."""
    if logits.is_cuda:
        # unchecked: among equal logits the twins may rank and name different ids
        return backend.run_unchecked(_sampling.token_logprobs, logits, ids, num_top)
    return _sampling.token_logprobs(logits, ids, num_top)
