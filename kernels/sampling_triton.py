# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The steps of sampling on a GPU, each on its own; `fused_sampling_triton` does all at once.

Limits and draws are found as there, without a sort; log-probabilities need no row of them in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qinfer.kernels.fused_sampling_triton import CHUNK, Limits, run, surveyed

LANES = 2048


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """As its meaning."""
    num_rows, num_tokens = logits.shape
    repetition, frequency, presence = (x.contiguous() for x in (repetition, frequency, presence))
    out = torch.empty(num_rows, num_tokens, dtype=logits.dtype, device=logits.device)
    _penalties[(triton.cdiv(num_tokens, LANES), num_rows)](
        logits, seen.view(torch.uint8), counts, repetition, frequency, presence, out, num_tokens,
        *(x.stride(0) for x in (logits, seen, counts)), LANES=LANES, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _penalties(logits, seen, counts, repetition, frequency, presence, out, num_tokens, logits_stride,
               seen_stride, counts_stride, LANES: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = token < num_tokens
    x = tl.load(logits + row * logits_stride + token, mask=mask).to(tl.float32)
    count = tl.load(counts + row * counts_stride + token, mask=mask, other=0.0)
    was_seen = tl.load(seen + row * seen_stride + token, mask=mask, other=0) != 0
    factor = tl.where(was_seen, tl.load(repetition + row), 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x -= tl.load(frequency + row) * count + tl.where(count > 0, tl.load(presence + row), 0.0)
    tl.store(out + row * num_tokens + token, x.to(out.dtype.element_ty), mask=mask)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As its meaning, and without waiting for the limits' values."""
    least = torch.empty(len(logits), device=logits.device)
    run(logits, None, Limits(None, top_k, top_p, min_p), least=least)
    return logits.masked_fill(logits < least.unsqueeze(1), float("-inf"))


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """As its meaning; -1 where a row's masses have no finite sum."""
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    run(logits, uniform, Limits(), ids=ids)
    return ids


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As its meaning; ranks are counted on logits, where fewer are equal than after the log-softmax."""
    num_rows, num_tokens = logits.shape
    found, _ = surveyed(logits, None)
    total = (found.maxima + found.sums.log()).logsumexp(1, keepdim=True)
    chosen = logits.gather(1, ids.unsqueeze(1)).float()
    above = torch.empty(found.maxima.shape, dtype=torch.int32, device=logits.device)
    grid = (above.shape[1], num_rows)
    _count_above[grid](
        logits,
        chosen,
        found.maxima,
        above,
        num_tokens,
        logits.stride(0),
        above.shape[1],
        CHUNK=CHUNK,
        num_warps=8,
    )
    values, tokens = logits.topk(min(num_top, num_tokens), dim=1)
    return (chosen - total).squeeze(1), above.sum(1) + 1, values.float() - total, tokens


@triton.jit
def _count_above(logits, chosen, maxima, above, num_tokens, stride, num_chunks, CHUNK: tl.constexpr):
    """Grid (pieces, rows): how many logits of a piece exceed the row's chosen one."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    limit = tl.load(chosen + row)
    at = row * num_chunks + chunk
    count = 0
    if tl.load(maxima + at) > limit:
        x = tl.load(logits + row * stride + token, mask=token < num_tokens, other=float("-inf"))
        count = tl.sum((x.to(tl.float32) > limit).to(tl.int32), 0)
    tl.store(above + at, count)
