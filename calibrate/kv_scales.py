"""Scales for an 8-bit KV cache, from the keys and values that calibration text makes.

Keys count as the cache gets them: after their norm and their rotation. What a scale is for is named by
`--kv-scales`:

    fp8        one for K and one for V of a layer, absmax / 448, in the checkpoint: `self_attn.k_scale`, [1]
    fp8-head   one per key head, [Hkv, 1, 1], the same names; qinfer's cache takes the largest of a layer
    int8-head  one per key head, absmax / 127, in a file beside it (`qinfer_kv_scales.json`), because other
               engines refuse a checkpoint that promises int8 there; qinfer's own int8 cache needs none

The first two are announced by the configuration's `kv_cache_scheme`, which makes engines store fp8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qinfer import ops
from qinfer.errors import UserError
from qinfer.model.causal import CausalAttention
from qinfer.model.heads import Heads
from qinfer.quant.rounding import FP8_MAX, stored_scale

KV_SCALES = ("fp8", "fp8-head", "int8-head")
SIDECAR = "qinfer_kv_scales.json"
_INT8_MAX = 127.0


class WatchedAttention(CausalAttention):
    """Plain attention that remembers the largest magnitude of each head's keys and values, float32 [Hkv]."""

    def __init__(self, num_sequences: int) -> None:
        super().__init__(num_sequences)
        self.k_absmax: Tensor | None = None
        self.v_absmax: Tensor | None = None

    def __call__(
        self, layer: int, heads: Heads, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        q, k, v = heads.turned()
        self.k_absmax, self.v_absmax = (x.abs().amax(dim=(0, 2)).float() for x in (k, v))
        return ops.attention(
            q, k, v, num_sequences=self.num_sequences, scale=scale, window=window, softcap=softcap
        )


def check_kind(kind: str | None) -> None:
    """UserError for what names no kind of scales; None means none."""
    if kind is not None and kind not in KV_SCALES:
        raise UserError(f"unknown KV scales {kind!r}; choose one of {', '.join(KV_SCALES)}", "kv_scales")


def head_maxima(attends: list[WatchedAttention]) -> dict[str, Tensor]:
    """{"k": [Hkv], "v": [Hkv]}: the largest magnitudes over all batches."""
    keys = [attend.k_absmax for attend in attends if attend.k_absmax is not None]
    values = [attend.v_absmax for attend in attends if attend.v_absmax is not None]
    assert len(keys) == len(values) == len(attends), "every batch has attended"
    return {"k": torch.stack(keys).amax(0), "v": torch.stack(values).amax(0)}


def scale_tensors(kind: str, maxima: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors for the checkpoint by name within the layer, in the checkpoint's dtype; none for int8."""
    if kind == "int8-head":
        return {}
    per_layer = {name: absmax.amax().view(1) for name, absmax in maxima.items()}
    per_head = {name: absmax.view(-1, 1, 1) for name, absmax in maxima.items()}
    chosen = per_layer if kind == "fp8" else per_head
    return {f"self_attn.{x}_scale": stored_scale(absmax / FP8_MAX, dtype) for x, absmax in chosen.items()}


def sidecar(maxima: Mapping[int, Mapping[str, Tensor]]) -> str:
    """The text of `qinfer_kv_scales.json`: layer -> {"k": [Hkv], "v": [Hkv]}, scales of int8."""
    tiny = torch.finfo(torch.float32).tiny
    scales = {
        str(layer): {name: (absmax / _INT8_MAX).clamp(min=tiny).tolist() for name, absmax in of.items()}
        for layer, of in sorted(maxima.items())
    }
    return json.dumps({"format": "int8 per key head", "scales": scales}, indent=1) + "\n"


def kv_cache_scheme(kind: str | None) -> dict[str, Any] | None:
    """What the configuration announces; None for none and for int8."""
    if kind not in ("fp8", "fp8-head"):
        return None
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor" if kind == "fp8" else "attn_head",
        "dynamic": False,
    }
