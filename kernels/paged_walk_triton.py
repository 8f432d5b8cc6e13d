# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The walk along a sequence's pages, tile by tile, and the logits' odds and ends: for decode and prefill.

A tile within one page needs one id; one that spans pages needs an id per token. A load that waits for a load
would halve the depth of a loop's pipeline, so callers ask for the next tile's ids one tile ahead. Ids beyond
a row's tokens are 0, never undefined: the pipeliner runs the last iterations' prefetches as copies of zero
bytes, whose addresses come from ids that were not loaded, and the table is not read past a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # finite: -inf minus -inf is NaN


@triton.jit
def page_ids(pages, at, stop, TILE: tl.constexpr, PAGE: tl.constexpr, SCALAR: tl.constexpr):
    """Pages of the TILE tokens from `at`, of those below `stop`: one id where SCALAR, else [TILE]."""
    here = at
    if not SCALAR:
        here = at + tl.arange(0, TILE)
    return tl.load(pages + here // PAGE, mask=here < stop, other=0)


@triton.jit
def slots_of(page, at, kv_head, num_kv_heads, TILE: tl.constexpr, PAGE: tl.constexpr, SCALAR: tl.constexpr):
    """Rows of [num_pages * Hkv * PAGE] that hold the TILE tokens from `at`, whose `page_ids` are `page`."""
    token = tl.arange(0, TILE)
    if not SCALAR:
        token = (at + token) % PAGE
    elif PAGE != TILE:
        token += at % PAGE
    return (page * num_kv_heads + kv_head) * PAGE + token


@triton.jit
def soft_cap(logits, softcap):
    """softcap * tanh(logits / softcap) in base 2, by the exponential; right for any size of logits."""
    return softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit
def sequence_of(firsts, count, block, ROWS: tl.constexpr):
    """Which of `count` sequences owns a block: the last that begins at it or before, by binary search.

    firsts: the rows before each. Sequence j has blocks of ROWS rows from (firsts[j] + j (ROWS - 1)) / ROWS,
    rounded down, on, where there is room for all its own. Returns j and the block's number among j's.
    """
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(firsts + middle) + middle * (ROWS - 1)) // ROWS <= block
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low, block - (tl.load(firsts + low) + low * (ROWS - 1)) // ROWS
