"""One typed function per op; the only importer of kernels.

Each op has one meaning in plain torch (qinfer/kernels/<op>.py). Where a device has something faster that
gives the same result, the choice is made here, by shape and by rules that were measured.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from qinfer.kernels import activation as _activation
from qinfer.kernels import attention as _attention
from qinfer.kernels import dense as _dense
from qinfer.kernels import kv_format as _kv_format
from qinfer.kernels import norm as _norm
from qinfer.kernels import paged_attention as _paged_attention
from qinfer.kernels import quantize_per_token as _quantize_per_token
from qinfer.kernels import rope as _rope
from qinfer.kernels import sampling as _sampling
from qinfer.kernels import w4a16 as _w4a16
from qinfer.kernels import w4a16_cpu as _w4a16_cpu
from qinfer.kernels import w8a8_fp8 as _w8a8_fp8
from qinfer.kernels import w8a8_fp8_cpu as _w8a8_fp8_cpu
from qinfer.kernels import w8a8_int8 as _w8a8_int8
from qinfer.kernels import w8a8_int8_cpu as _w8a8_int8_cpu
from qinfer.kernels import w8a16_int8 as _w8a16_int8
from qinfer.kernels import w8a16_int8_cpu as _w8a16_int8_cpu
from qinfer.kernels import write_kv as _write_kv
from qinfer.kernels.kv_format import KVPages as KVPages
from qinfer.kernels.paged_attention import Geometry as Geometry
from qinfer.kernels.paged_attention import PagedBatch as PagedBatch
from qinfer.kernels.paged_attention import RowGroup as RowGroup

_log = logging.getLogger(__name__)

# --- model: norms, rotation, activations, attention without a cache -------------------------------------


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(RMS norm of the new residual, the new residual = residual + multiplier * x); all [T, H]."""
    return _norm.add_rms_norm(x, residual, weight, eps, offset, multiplier)


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
    """Causal attention of equally long sequences: q [B*T, Hq, D], k and v [B*T, Hkv, D] -> [B*T, Hq, D]."""
    return _attention.attention(
        q, k, v, num_sequences=num_sequences, scale=scale, window=window, softcap=softcap
    )


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up: [T, 2 I] -> [T, I]."""
    return _activation.gelu_mul(gate_up)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """RMS norm over the last dimension, times (offset + weight): [..., H] -> [..., H]."""
    return _norm.rms_norm(x, weight, eps, offset)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [T, N, D] by cos and signed sin [T, R]; returns a new [T, N, D]."""
    return _rope.rope(heads, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] -> [T, I]."""
    return _activation.silu_mul(gate_up)


# --- quant: products with quantized weights ----------------------------------------------------------------


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], all of one dtype."""
    return _dense.dense(x, weight)


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes int8 [T, K] and scale float32 [T, 1] = absmax / 127."""
    return _quantize_per_token.int8_per_token(x)


def fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, 1] = absmax / 448."""
    return _quantize_per_token.fp8_per_token(x)


@cache
def onednn_int8_is_exact() -> bool:
    """Whether oneDNN's int8 product gives the exact integers on this processor; tried once, then known.

    Without VNNI instructions it may saturate at 16 bits. Then `w8a8_int8` runs its meaning, and says so.
    """
    exact = _w8a8_int8_cpu.gives_exact_integers()
    if not exact:
        _log.warning("w8a8_int8: oneDNN saturates on this processor; running in plain torch, which is slow")
    return exact


def pack_w8a8_int8(weight: Tensor) -> Tensor:
    """Weight int8 [N, K] in the layout that `w8a8_int8` reads fastest on its device; memory of its own."""
    return weight.clone()  # what was read lazily is a view of a file, which may change under a long run


def w8a8_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `pack_w8a8_int8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    if x.device.type == "cpu" and onednn_int8_is_exact():
        return _w8a8_int8_cpu.w8a8_int8_cpu(x, weight, weight_scale)
    return _w8a8_int8.w8a8_int8(x, weight, weight_scale)


def w8a16_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale [N] in x's dtype -> [T, N] in x's dtype."""
    if x.device.type == "cpu":
        return _w8a16_int8_cpu.w8a16_int8_cpu(x, weight, weight_scale)
    return _w8a16_int8.w8a16_int8(x, weight, weight_scale)


def widen_w8a8_fp8(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight float8_e4m3fn [N, K] in the form that `w8a8_fp8` reads fastest on its device.

    `dtype` is that of the activations to come.
    """
    return _w8a8_fp8_cpu.widen(weight, dtype) if weight.device.type == "cpu" else weight


def w8a8_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `widen_w8a8_fp8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    if weight.dtype is torch.float8_e4m3fn:
        return _w8a8_fp8.w8a8_fp8(x, weight, weight_scale)
    return _w8a8_fp8_cpu.w8a8_fp8_cpu(x, weight, weight_scale)


def pack_w4a16(weight: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """The arguments of `w4a16` from weight uint8 [N, K/2] (even k low), scale and zero uint8 [N, G]."""
    if weight.device.type == "cpu":
        return _w4a16_cpu.pack(weight, scale, zero)
    return {"weight": weight, "scale": scale, "zero": zero}


def w4a16(x: Tensor, packed: Mapping[str, Tensor]) -> Tensor:
    """x [T, K] times the 4-bit weight that `pack_w4a16` made ready -> [T, N] in x's dtype."""
    if "nibbles" in packed:
        return _w4a16_cpu.w4a16_cpu(x, **packed)
    return _w4a16.w4a16(x, **packed)


def cpu_paths() -> dict[str, str]:
    """How each product runs on this CPU, in words; a scheme that is not named runs its meaning."""
    rows = {"int8": _w8a16_int8_cpu.MAX_ROWS_OF_INT8_OP, "int4": _w4a16_cpu.MAX_ROWS_OF_INT4_OP}
    rows["w8a8"] = _w8a8_int8_cpu.MAX_ROWS_OF_INT8_OP
    exact = f"torch int8 op up to {rows['w8a8']} rows of bfloat16, else oneDNN int8 x int8"
    return {
        "dense": "torch linear",
        "w8a8-int8": exact if onednn_int8_is_exact() else "plain torch: oneDNN's int8 saturates here",
        "w8a16-int8": f"torch int8 op up to {rows['int8']} rows of bfloat16, else weights widened per call",
        "w8a8-fp8": "weights widened at load to bfloat16 (float32 for other activations), torch linear",
        "w4a16": f"torch int4 op up to {rows['int4']} rows of bfloat16, else weights unpacked per call",
    }


# --- engine: the paged cache and sampling ------------------------------------------------------------------


def write_kv(k: Tensor, v: Tensor, pages: KVPages, slots: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at slots [T] int64 (page * PAGE + offset) of a layer's pages, in place."""
    _write_kv.write_kv(k, v, pages, slots)


def group_rows(batch: PagedBatch, geometry: Geometry) -> tuple[RowGroup, ...]:
    """How `paged_attention` will read a step's pages; once per step for all layers of equal geometry."""
    return _paged_attention.group_rows(batch, geometry)


def paged_attention(
    q: Tensor, pages: KVPages, groups: tuple[RowGroup, ...], *, scale: float, softcap: float | None
) -> Tensor:
    """q [T, Hq, D] attends to its own sequence's pages up to itself -> [T, Hq, D] in q's dtype."""
    return _paged_attention.paged_attention(q, pages, groups, scale=scale, softcap=softcap)


def token_counts(ids: Tensor, vocab_size: int) -> Tensor:
    """ids [R, L] int64, padded with vocab_size -> how often each token occurs, [R, V] float32."""
    return _sampling.token_counts(ids, vocab_size)


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """logits, seen (bool), counts [R, V]; penalties [R] -> logits [R, V]."""
    return _sampling.apply_penalties(logits, seen, counts, repetition, frequency, presence)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [R, V], limits [R] -> logits with -inf for what min_p, top_k and top_p leave out."""
    return _sampling.filter_logits(logits, top_k, top_p, min_p)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [R, V], decided by uniform [R] float64 in [0, 1) -> [R] int64."""
    return _sampling.draw(logits, uniform)


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of logits [R, V] at ids [R], ranks from 1, the num_top largest and their ids."""
    return _sampling.token_logprobs(logits, ids, num_top)


def kv_dtype(name: str) -> torch.dtype:
    """The stored dtype that a resolved kv_cache_dtype names ("fp8": e4m3)."""
    return _kv_format.DTYPES[name]
