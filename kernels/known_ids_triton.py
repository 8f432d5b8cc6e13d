# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The tokens of a step on a GPU in one launch, its first: the twin of `known_ids`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 256  # per program


def known_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> Tensor:
    """As its meaning."""
    out = torch.empty_like(token_ids)
    grid = (triton.cdiv(len(out), TOKENS),)
    _kernel[grid](token_ids, last, lanes, out, len(out), TOKENS=TOKENS, num_warps=4)
    return out


@triton.jit(do_not_specialize=["count"])
def _kernel(token_ids, last, lanes, out, count, TOKENS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < count
    token = tl.load(token_ids + at, mask=inside, other=0)
    lane = tl.load(lanes + at, mask=inside, other=0)
    sampled = tl.load(last + lane, mask=inside & (token < 0), other=0)
    tl.store(out + at, tl.where(token < 0, tl.maximum(sampled, 0), token), mask=inside)
