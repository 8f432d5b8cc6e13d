"""Causal attention over whole sequences whose keys and values are at hand, no cache: what calibration runs.

Grouped queries: query head h reads key head h // (Hq / Hkv). A window w lets a token see the last w tokens,
itself among them. A softcap c bends every score to c * tanh(score / c) before the softmax (Gemma 2); torch's
fused attention has no place for it, so that case is written out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_sequences: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """softmax(mask(softcap(scale * q.k))) v for `num_sequences` sequences of equal length, one after another.

    q [B*T, Hq, D], k and v [B*T, Hkv, D]; returns [B*T, Hq, D] in q's dtype.
    """
    queries, keys, values = (x.view(num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    length = queries.shape[2]
    mask = None if window is None or window >= length else _band(length, window, q.device)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    else:
        groups = queries.reshape(num_sequences, keys.shape[1], -1, length, q.shape[-1])
        scores = softcap * torch.tanh((groups @ keys[:, :, None].mT).float() * (scale / softcap))
        visible = _band(length, length, q.device) if mask is None else mask
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(v.dtype)
        out = (weights @ values[:, :, None]).flatten(1, 2)
    return out.transpose(1, 2).flatten(0, 1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[T, T] bool: row i sees columns i - window < j <= i."""
    behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (behind >= 0) & (behind < window)
