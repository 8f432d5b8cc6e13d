# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The tokens of a step on a GPU in one launch, its first: the twin of `put_known_ids`.

In place: where kernels are only compiled and none runs, the tokens stay ids of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 256  # per program


def put_known_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> None:
    """As its meaning."""
    grid = (triton.cdiv(len(token_ids), TOKENS),)
    _kernel[grid](token_ids, last, lanes, len(token_ids), TOKENS=TOKENS, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def _kernel(token_ids, last, lanes, count, TOKENS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < count
    unknown = tl.load(token_ids + at, mask=inside, other=0) < 0
    lane = tl.load(lanes + at, mask=unknown, other=0)
    sampled = tl.load(last + lane, mask=unknown, other=0)
    tl.store(token_ids + at, tl.maximum(sampled, 0), mask=unknown)
