# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Cosines and sines of a step on a GPU in one launch: the twin of `rope_angles`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 8  # per program


def rope_angles(
    positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As its meaning."""
    count, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(count, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    _kernel[(triton.cdiv(count, TOKENS),)](
        positions, frequencies, cos, sin, count, magnitude, HALF=half,
        LANES=triton.next_power_of_2(half), TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize=["count", "magnitude"])
def _kernel(positions, frequencies, cos, sin, count, magnitude, HALF: tl.constexpr, LANES: tl.constexpr,
            TOKENS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, LANES)
    mask = (token < count)[:, None] & (lane < HALF)[None, :]
    position = tl.load(positions + token, mask=token < count, other=0).to(tl.float32)
    frequency = tl.load(frequencies + lane, mask=lane < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    c = (tl.cos(angle) * magnitude).to(cos.dtype.element_ty)
    s = tl.sin(angle) * magnitude
    at = token[:, None] * (2 * HALF) + lane[None, :]
    tl.store(cos + at, c, mask=mask)
    tl.store(cos + at + HALF, c, mask=mask)
    tl.store(sin + at, (-s).to(sin.dtype.element_ty), mask=mask)
    tl.store(sin + at + HALF, s.to(sin.dtype.element_ty), mask=mask)
