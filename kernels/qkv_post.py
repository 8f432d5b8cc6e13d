"""Everything between the projection to queries, keys and values and attention, as one op.

    bias -> norm of every query and key head -> rotation -> K and V into their pages, queries out

On its own, each step reads and writes all of q, k and v once more, and quantizing K and V would too; together
they are one pass. All of it is float32 until the one rounding to what is stored: that of the pages for K and
V, `dtype` for the queries. So results may differ in the last bit from the single ops, which round in between.

The projection may come as partial sums of its inner dimension (split-K); they are added here, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.norm import rms_norm
from qinfer.kernels.rope import rope
from qinfer.kernels.sums import rounded, summed
from qinfer.kernels.write_kv import write_kv


class HeadNorms(NamedTuple):
    """RMS norms of query and key heads, weights [D]: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0


def qkv_post(
    qkv: Tensor,
    pages: KVPages,
    slots: Tensor,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    norms: HeadNorms | None = None,
    bias: Tensor | None = None,
    q_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Stores K and V of qkv at `slots` of the pages, in place; returns the queries [T, Hq, D].

    qkv [T, N] or partial sums [S, T, N] with N = (Hq + 2 Hkv) * D, heads in the order q, k, v; slots [T]
    int64, negative: page 0; rotation: cos and signed sin [T, R] as `rope` takes them; bias [N]. Queries are
    multiplied by `q_scale` and returned in `dtype` (None: that of qkv).
    """
    num_kv_heads, _, dim = pages.k.shape[1:]
    total = rounded(summed(qkv), bias, torch.float32)
    heads = total.view(len(total), -1, dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    num_qk = num_q_heads + num_kv_heads
    q, k, v = heads[:, :num_q_heads], heads[:, num_q_heads:num_qk], heads[:, num_qk:]
    if norms is not None:
        q = rms_norm(q, norms.q.float(), norms.eps, norms.offset)
        k = rms_norm(k, norms.k.float(), norms.eps, norms.offset)
    if rotation is not None:
        cos, sin = rotation[0].float(), rotation[1].float()
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    write_kv(k, v, pages, slots)
    return (q * q_scale).to(dtype or qkv.dtype)
