"""How K and V lie in the pool: the number formats of a page and what the stored numbers mean.

A layer's pages are [num_pages, Hkv, PAGE, D]: one head's tokens of one page are contiguous, so a GPU tile is
one page and a CPU gather copies whole rows of PAGE * D numbers. Page 0 belongs to nobody.

- bfloat16, float16, float32: stored as they are.
- int8: symmetric, one float32 scale per token and head (amax / 127) beside the pages.
- fp8: e4m3 (OCP, largest 448), one scale per tensor and layer from the checkpoint; values beyond scale * 448
  saturate, because a plain cast makes NaN of them.

fp8 is read through a table of 256 entries: torch's own cast takes four times as long on a CPU (measured at
3e5 values: 2.6 ms by table, 11.6 ms by cast).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.kernels.quantize_per_token import FP8_MAX, INT8_MAX

FP8 = torch.float8_e4m3fn
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": FP8,
}


class KVPages(NamedTuple):
    """One layer's pages: k and v [num_pages, Hkv, PAGE, D] in a stored dtype, with what their numbers need.

    `k_scales`, `v_scales` [num_pages, Hkv, PAGE] float32 exist for int8; `k_scale`, `v_scale` count for fp8.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def halves(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor | None, float], ...]:
        """K and V of a step, each with the pages that it goes to, their scales and their scale."""
        return (k, self.k, self.k_scales, self.k_scale), (v, self.v, self.v_scales, self.v_scale)


def store(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """What is stored for x [T, Hkv, D]: numbers of `dtype`, and for int8 the scales [T, Hkv]."""
    if dtype == torch.int8:
        scales = x.float().abs().amax(-1).clamp_(min=1e-12) / INT8_MAX
        return (x.float() / scales.unsqueeze(-1)).round_().to(torch.int8), scales
    if dtype == FP8:
        return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), None
    return x.to(dtype), None


def load(stored: Tensor, scales: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """What stored numbers [..., D] mean, in `dtype`; `scales` [...] for int8, `scale` for fp8."""
    if stored.dtype == torch.int8:
        assert scales is not None
        return (stored * scales.unsqueeze(-1)).to(dtype)
    if stored.dtype == FP8:
        table = fp8_values(scale, dtype, stored.device)
        return table.index_select(0, stored.view(torch.uint8).flatten().int()).view(stored.shape)
    return stored.to(dtype)


@cache
def fp8_values(scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 256 values of e4m3 times `scale`, [256] in `dtype`, indexed by their bytes."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    return (codes.float() * scale).to(dtype)
