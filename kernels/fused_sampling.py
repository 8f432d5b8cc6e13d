"""From logits to one token per row in one op: what `sampling` does in steps, greedy rows among the others.

A limit that is None is off for every row, which a caller may know where the op may not look (the values are
on a GPU); 0, 1 and 0 switch top_k, top_p and min_p off for single rows. A row that holds NaN gives -1 for
its token: something overflowed, and any token would be made up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels.sampling import draw, filter_logits


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits [R, V], the first of equals -> [R] int64; -1 for NaN."""
    largest, ids = logits.max(1)
    return ids.masked_fill(largest.isnan(), -1)


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """One token per row of logits [R, V] -> [R] int64; -1 for NaN.

    Rows of temperature [R] 0 are greedy; others are divided by it, filtered as `filter_logits` says and drawn
    by uniform [R] float64 in [0, 1).
    """
    likeliest = greedy(logits)
    device = logits.device
    scaled = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    off = torch.zeros(len(logits), device=device)
    kept = filter_logits(
        scaled,
        off.long() if top_k is None else top_k,
        off + 1 if top_p is None else top_p,
        off if min_p is None else min_p,
    )
    return torch.where((temperature > 0) & (likeliest >= 0), draw(kept, uniform), likeliest)
