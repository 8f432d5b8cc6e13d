# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rotary embedding on a GPU, for callers outside the fused path of `qkv_post`: the twin of `rope`.

A program takes some (token, head) rows. The two halves that turn together lie in registers side by side, so
rotating needs no exchange between threads; what does not turn is copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # (token, head) rows per program


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As its meaning, rounded once."""
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    num_tokens, num_heads, dim = heads.shape
    half = cos.shape[-1] // 2
    rest = dim - 2 * half
    out = torch.empty(num_tokens, num_heads, dim, dtype=heads.dtype, device=heads.device)
    _kernel[(triton.cdiv(num_tokens * num_heads, ROWS),)](
        heads, cos.contiguous(), sin.contiguous(), out, num_tokens * num_heads, num_heads,
        *heads.stride()[:2], DIM=dim, HALF=half, HALF_LANES=triton.next_power_of_2(half), REST=rest,
        REST_LANES=triton.next_power_of_2(max(1, rest)), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _kernel(heads, cos, sin, out, num_rows, num_heads, token_stride, head_stride, DIM: tl.constexpr,
            HALF: tl.constexpr, HALF_LANES: tl.constexpr, REST: tl.constexpr, REST_LANES: tl.constexpr,
            ROWS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    token = row // num_heads
    source = heads + (token * token_stride + row % num_heads * head_stride)[:, None]
    target = out + (row * DIM)[:, None]
    lane = tl.arange(0, HALF_LANES)[None, :]
    mask = real[:, None] & (lane < HALF)
    left = tl.load(source + lane, mask=mask).to(tl.float32)
    right = tl.load(source + lane + HALF, mask=mask).to(tl.float32)
    angle = (token * (2 * HALF))[:, None] + lane
    cos_left = tl.load(cos + angle, mask=mask).to(tl.float32)
    cos_right = tl.load(cos + angle + HALF, mask=mask).to(tl.float32)
    sin_left = tl.load(sin + angle, mask=mask).to(tl.float32)
    sin_right = tl.load(sin + angle + HALF, mask=mask).to(tl.float32)
    tl.store(target + lane, (left * cos_left + right * sin_left).to(out.dtype.element_ty), mask=mask)
    tl.store(target + lane + HALF, (right * cos_right + left * sin_right).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        lane = tl.arange(0, REST_LANES)[None, :]
        mask = real[:, None] & (lane < REST)
        tl.store(target + lane + 2 * HALF, tl.load(source + lane + 2 * HALF, mask=mask), mask=mask)
