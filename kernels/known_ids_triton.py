# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Tokens from step to step on a GPU: twins of `put_known_ids`, its first launch, and `keep_ids`, its last.

In place: where kernels are only compiled and none runs, the tokens stay ids of the vocabulary.

`keep_ids` writes to the host's memory itself. The copy engine would take as long for so few, and what waits
for another engine begins late: of 2,560 us from step to step of one sequence 29 lay between the choice of a
token and the next step's first kernel, with `bring` (arrivals_triton.py) and this 13 (H200).
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


def keep_ids(ids: Tensor, lanes: Tensor, last: Tensor, host: Tensor) -> None:
    """As its meaning."""
    if not len(ids):
        return
    grid = (triton.cdiv(len(ids), TOKENS),)
    _keep[grid](ids, lanes, last, host, len(ids), len(host), TOKENS=TOKENS, num_warps=4)


@triton.jit(do_not_specialize=["count", "told"])
def _keep(ids, lanes, last, host, count, told, TOKENS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < count
    token = tl.load(ids + at, mask=inside, other=0)
    lane = tl.load(lanes + at, mask=inside, other=0)
    tl.store(last + lane, token, mask=inside)
    tl.store(host + at, token, mask=at < told)


@triton.jit(do_not_specialize=["count"])
def _kernel(token_ids, last, lanes, count, TOKENS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < count
    unknown = tl.load(token_ids + at, mask=inside, other=0) < 0
    lane = tl.load(lanes + at, mask=unknown, other=0)
    sampled = tl.load(last + lane, mask=unknown, other=0)
    tl.store(token_ids + at, tl.maximum(sampled, 0), mask=unknown)
