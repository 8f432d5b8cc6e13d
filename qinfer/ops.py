"""One typed function per op; with `backend`, the only importer of kernels.

Each op has one meaning in plain torch (qinfer/kernels/<op>.py). Where a device has something faster that
gives the same result, the choice is made here, by shape and by rules that were measured. On a GPU that is a
Triton kernel, the meaning's twin, and `backend` decides between the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from qinfer import backend as _backend
from qinfer.kernels import activation as _activation
from qinfer.kernels import attention as _attention
from qinfer.kernels import dense as _dense
from qinfer.kernels import fused_activation as _fused_activation
from qinfer.kernels import fused_norm as _fused_norm
from qinfer.kernels import fused_sampling as _fused_sampling
from qinfer.kernels import int8_row_cpu as _int8_row_cpu
from qinfer.kernels import kv_format as _kv_format
from qinfer.kernels import norm as _norm
from qinfer.kernels import paged_attention as _paged_attention
from qinfer.kernels import panels as _panels
from qinfer.kernels import qkv_post as _qkv_post
from qinfer.kernels import quantize_per_token as _quantize_per_token
from qinfer.kernels import rope as _rope
from qinfer.kernels import rope_angles as _rope_angles
from qinfer.kernels import sampling as _sampling
from qinfer.kernels import w4a16 as _w4a16
from qinfer.kernels import w4a16_cpu as _w4a16_cpu
from qinfer.kernels import w8a8_fp8 as _w8a8_fp8
from qinfer.kernels import w8a8_fp8_block as _w8a8_fp8_block
from qinfer.kernels import w8a8_fp8_block_cpu as _w8a8_fp8_block_cpu
from qinfer.kernels import w8a8_fp8_cpu as _w8a8_fp8_cpu
from qinfer.kernels import w8a8_int8 as _w8a8_int8
from qinfer.kernels import w8a8_int8_cpu as _w8a8_int8_cpu
from qinfer.kernels import w8a16_fp8 as _w8a16_fp8
from qinfer.kernels import w8a16_fp8_cpu as _w8a16_fp8_cpu
from qinfer.kernels import w8a16_int8 as _w8a16_int8
from qinfer.kernels import w8a16_int8_cpu as _w8a16_int8_cpu
from qinfer.kernels import write_kv as _write_kv
from qinfer.kernels import write_kv_cpu as _write_kv_cpu
from qinfer.kernels.int8_row_cpu import Int8Row as Int8Row
from qinfer.kernels.kv_format import KVPages as KVPages
from qinfer.kernels.paged_attention import Geometry as Geometry
from qinfer.kernels.paged_attention import PagedBatch as PagedBatch
from qinfer.kernels.qkv_post import HeadNorms as HeadNorms
from qinfer.kernels.qkv_row_cpu import qkv_row as qkv_row

_log = logging.getLogger(__name__)

Groups: TypeAlias = Any
"""How a step's pages are read: `RowGroup`s or the plan of a GPU's kernels, from `group_rows` alone."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Activations that are quantized already: values [T, K] int8 or e4m3, scale float32 [T, 1].

    `dtype` is that of the model's activations, in which a product returns its result.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype


Activations: TypeAlias = Tensor | Codes | Int8Row


class Parts(NamedTuple):
    """A product on a GPU that cut its inner dimension: partial sums float32 [S, T, N], of `dtype` in all.

    The op that takes them adds them up in their order.
    """

    sums: Tensor
    dtype: torch.dtype


Product: TypeAlias = Tensor | Parts
"""What a product leaves; `add_rms_norm` takes it as it is, for others `scaled` finishes it."""


def _product(y: Tensor, dtype: torch.dtype) -> Tensor | Parts:
    return Parts(y, dtype) if y.dim() == 3 else y


def is_int8_row(codes: torch.dtype | None, x: Tensor) -> bool:
    """Whether x, to become `codes`, is one token on a CPU, of which a product leaves float32."""
    return codes is torch.int8 and x.shape[0] == 1 and not x.is_cuda and onednn_int8_is_exact()


def as_row(codes: torch.dtype | None, x: Activations) -> Activations:
    """x, quantized where it is one token on a CPU and the product to come wants `codes`."""
    if isinstance(x, Tensor) and is_int8_row(codes, x):
        return _int8_row_cpu.quantize(x)
    return x


def scaled(product: Product) -> Tensor:
    """A product as numbers [T, N]."""
    if isinstance(product, Tensor):
        return product
    return _fused_norm.summed(product.sums).to(product.dtype)


# --- model: norms, rotation, activations, attention without a cache -------------------------------------


def add_rms_norm(
    x: Product, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(RMS norm of the new residual, the new residual = residual + multiplier * x); all [T, H]."""
    if isinstance(x, Parts):
        return _backend.run(_fused_norm.add_rms_norm_parts, x.sums, residual, weight, eps, offset, multiplier)
    if x.is_cuda:
        return _backend.run(_norm.add_rms_norm, x, residual, weight, eps, offset, multiplier)
    return _norm.add_rms_norm(x, residual, weight, eps, offset, multiplier)


_ADD_NORM_TO = {
    torch.int8: _fused_norm.add_rms_norm_int8,
    torch.float8_e4m3fn: _fused_norm.add_rms_norm_fp8,
}


def add_rms_norm_to(
    codes: torch.dtype | None,
    x: Product,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    multiplier: float = 1.0,
    wide: Tensor | None = None,
) -> tuple[Activations, Tensor]:
    """`add_rms_norm` for a product that wants `codes`: in one pass on a GPU, and for one token on a CPU.

    Elsewhere the product makes its own codes. `wide` is offset + weight in float32, from a caller who keeps
    it for that one token: to make it takes longer than the norm.
    """
    if isinstance(x, Parts):
        if codes is None:
            return add_rms_norm(x, residual, weight, eps, offset=offset, multiplier=multiplier)
        x = x.sums
    if is_int8_row(codes, x):
        wide = weight.float() + offset if wide is None else wide
        return _int8_row_cpu.add_rms_norm(x, residual, wide, eps, multiplier)
    if codes is None or not x.is_cuda:
        return add_rms_norm(x, residual, weight, eps, offset=offset, multiplier=multiplier)
    values, scale, total = _backend.run(_ADD_NORM_TO[codes], x, residual, weight, eps, offset, multiplier)
    return Codes(values, scale, residual.dtype), total


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
    if gate_up.is_cuda:
        return _backend.run(_activation.gelu_mul, gate_up)
    return _activation.gelu_mul(gate_up)


def rms_norm(x: Product, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """RMS norm over the last dimension, times (offset + weight): [..., H] -> [..., H]."""
    if isinstance(x, Parts):
        return _backend.run(_fused_norm.rms_norm_parts, x.sums, weight, eps, offset, x.dtype)
    if x.is_cuda:
        return _backend.run(_norm.rms_norm, x, weight, eps, offset)
    return _norm.rms_norm(x, weight, eps, offset)


_NORM_TO = {torch.int8: _fused_norm.rms_norm_int8, torch.float8_e4m3fn: _fused_norm.rms_norm_fp8}


def rms_norm_to(
    codes: torch.dtype | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    wide: Tensor | None = None,
) -> Activations:
    """`rms_norm` for a product that wants `codes`: see `add_rms_norm_to`."""
    if is_int8_row(codes, x):
        return _int8_row_cpu.rms_norm(x, weight.float() + offset if wide is None else wide, eps)
    if codes is None or not x.is_cuda:
        return rms_norm(x, weight, eps, offset=offset)
    return Codes(*_backend.run(_NORM_TO[codes], x, weight, eps, offset), x.dtype)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [T, N, D] by cos and signed sin [T, R]; returns a new [T, N, D]."""
    if heads.is_cuda:
        return _backend.run(_rope.rope, heads, cos, sin)
    return _rope.rope(heads, cos, sin)


def rope_angles(
    positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `rope` takes, of positions [T] int64 and frequencies [R / 2] float32: cos and sin [T, R]."""
    if positions.is_cuda:
        return _backend.run(_rope_angles.rope_angles, positions, frequencies, magnitude, dtype)
    return _rope_angles.rope_angles(positions, frequencies, magnitude, dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] -> [T, I]."""
    if gate_up.is_cuda:
        return _backend.run(_activation.silu_mul, gate_up)
    return _activation.silu_mul(gate_up)


_GATED_TO: dict[tuple[Callable[[Tensor], Tensor], torch.dtype], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    (silu_mul, torch.int8): _fused_activation.silu_mul_int8,
    (silu_mul, torch.float8_e4m3fn): _fused_activation.silu_mul_fp8,
    (gelu_mul, torch.int8): _fused_activation.gelu_mul_int8,
    (gelu_mul, torch.float8_e4m3fn): _fused_activation.gelu_mul_fp8,
}


def gated_to(codes: torch.dtype | None, gate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Activations:
    """`gate`, which is silu_mul or gelu_mul, for a product that wants `codes`: see `add_rms_norm_to`."""
    if is_int8_row(codes, gate_up):
        return _int8_row_cpu.silu_mul(gate_up) if gate is silu_mul else _int8_row_cpu.gelu_mul(gate_up)
    if codes is None or not gate_up.is_cuda:
        return gate(gate_up)
    return Codes(*_backend.run(_GATED_TO[gate, codes], gate_up), gate_up.dtype)


# --- quant: products with quantized weights ----------------------------------------------------------------


# On a GPU a product takes a bias [N], which joins its float32 sums before they are rounded. `in_parts`: who
# takes the result may get `Parts`; then there is no bias.


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], all of one dtype."""
    return _dense.dense(x, weight) if bias is None else functional.linear(x, weight, bias)


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes int8 [T, K] and scale float32 [T, 1] = absmax / 127."""
    if x.is_cuda:
        return _backend.run(_quantize_per_token.int8_per_token, x)
    return _quantize_per_token.int8_per_token(x)


def fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, 1] = absmax / 448."""
    if x.is_cuda:
        return _backend.run(_quantize_per_token.fp8_per_token, x)
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
    if weight.is_cuda:
        return _panels.to_panels(weight)
    return weight.clone()  # what was read lazily is a view of a file, which may change under a long run


def w8a8_int8(
    x: Activations,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    in_parts: bool = False,
) -> Product:
    """x [T, K], weight from `pack_w8a8_int8`, weight_scale float32 [N] -> [T, N] in x's dtype.

    Of a row that came quantized, from `as_row` or a norm, float32.
    """
    if isinstance(x, Int8Row):
        return _int8_row_cpu.product(x, weight, weight_scale)
    if isinstance(x, Tensor) and x.is_cuda:
        x = Codes(*int8_per_token(x), x.dtype)
    if isinstance(x, Codes):
        given = x.values, x.scale, weight, weight_scale, x.dtype
        if in_parts:
            return _product(_backend.run(_w8a8_int8.w8a8_int8_parts, *given), x.dtype)
        return _backend.run(_w8a8_int8.w8a8_int8_codes, *given, bias)
    if x.device.type == "cpu" and onednn_int8_is_exact():
        return _w8a8_int8_cpu.w8a8_int8_cpu(x, weight, weight_scale)
    return _w8a8_int8.w8a8_int8(x, weight, weight_scale)


def pack_w8a16_int8(weight: Tensor) -> Tensor:
    """Weight int8 [N, K] in the layout that `w8a16_int8` reads on its device."""
    return _panels.to_fragments(weight) if weight.is_cuda else weight


def w8a16_int8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, in_parts: bool = False
) -> Tensor | Parts:
    """x [T, K], weight from `pack_w8a16_int8`, weight_scale [N] in x's dtype -> [T, N] in x's dtype."""
    if x.is_cuda and in_parts:
        parts = _backend.run(_w8a16_int8.w8a16_int8_parts, x, weight, weight_scale)
        return _product(parts, x.dtype)
    if x.is_cuda:
        return _backend.run(_w8a16_int8.w8a16_int8, x, weight, weight_scale, bias)
    return _w8a16_int8_cpu.w8a16_int8_cpu(x, weight, weight_scale)


def pack_w8a8_fp8(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight float8_e4m3fn [N, K] in the form that `w8a8_fp8` reads fastest on its device.

    `dtype` is that of the activations to come.
    """
    return _panels.to_panels(weight) if weight.is_cuda else _w8a8_fp8_cpu.widen(weight, dtype)


def w8a8_fp8(
    x: Activations,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    in_parts: bool = False,
) -> Tensor | Parts:
    """x [T, K], weight from `pack_w8a8_fp8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    if isinstance(x, Tensor) and x.is_cuda:
        x = Codes(*fp8_per_token(x), x.dtype)
    if isinstance(x, Codes):
        given = x.values, x.scale, weight, weight_scale, x.dtype
        if in_parts:
            return _product(_backend.run(_w8a8_fp8.w8a8_fp8_parts, *given), x.dtype)
        return _backend.run(_w8a8_fp8.w8a8_fp8_codes, *given, bias)
    assert isinstance(x, Tensor)
    return _w8a8_fp8_cpu.w8a8_fp8_cpu(x, weight, weight_scale)


def fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Codes float8_e4m3fn [T, K] of x [T, K] on the grid of scale float32 [1]; what exceeds it saturates."""
    if x.is_cuda:
        return _backend.run(_w8a8_fp8.fp8_static, x, scale)
    return _w8a8_fp8.fp8_static(x, scale)


def w8a8_fp8_static(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [T, K], weight from `pack_w8a8_fp8`, weight_scale float32 [N], input_scale float32 [1] -> [T, N]."""
    if x.is_cuda:
        return _backend.run(_w8a8_fp8.w8a8_fp8_static, x, weight, weight_scale, input_scale, bias)
    return _w8a8_fp8_cpu.w8a8_fp8_static_cpu(x, weight, weight_scale, input_scale)


def fp8_per_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, ceil(K/128)] = absmax of 128 / 448."""
    return _w8a8_fp8_block.fp8_per_group(x)


def pack_w8a8_fp8_block(
    weight: Tensor, block_scale: Tensor, row_scale: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The arguments of `w8a8_fp8_block` beside x: from codes float8_e4m3fn [N, K] and their scales.

    A GPU reads block_scale [ceil(N/128), ceil(K/128)], a CPU row_scale [N, ceil(K/128)]. `dtype` is that of
    the activations to come.
    """
    if weight.is_cuda:
        return {"weight": _panels.to_panels(weight), "weight_scale": block_scale.float()}
    return {"weight": _w8a8_fp8_block_cpu.scale_and_widen(weight, row_scale, dtype)}


def w8a8_fp8_block(x: Tensor, packed: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
    """x [T, K] times the weight that `pack_w8a8_fp8_block` made ready -> [T, N] in x's dtype."""
    if x.is_cuda:
        return _backend.run(_w8a8_fp8_block.w8a8_fp8_block, x, packed["weight"], packed["weight_scale"], bias)
    return _w8a8_fp8_block_cpu.w8a8_fp8_block_cpu(x, packed["weight"])


def pack_w8a16_fp8(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight float8_e4m3fn [N, K] in the form that `w8a16_fp8` reads fastest on its device."""
    return _panels.to_fragments(weight) if weight.is_cuda else _w8a8_fp8_cpu.widen(weight, dtype)


def w8a16_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight from `pack_w8a16_fp8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    if x.is_cuda:
        return _backend.run(_w8a16_fp8.w8a16_fp8, x, weight, weight_scale, bias)
    return _w8a16_fp8_cpu.w8a16_fp8_cpu(x, weight, weight_scale)


def pack_w4a16(weight: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """The arguments of `w4a16` from weight uint8 [N, K/2] (even k low), scale and zero uint8 [N, G]."""
    if not weight.is_cuda:
        return _w4a16_cpu.pack(weight, scale, zero)
    if scale.dtype in _w4a16.MAGIC:
        return _w4a16.pack_fragments(weight, scale, zero)
    return {"weight": weight, "scale": scale, "zero": zero}


def w4a16(
    x: Tensor, packed: Mapping[str, Tensor], bias: Tensor | None = None, *, in_parts: bool = False
) -> Tensor | Parts:
    """x [T, K] times the 4-bit weight that `pack_w4a16` made ready -> [T, N] in x's dtype."""
    if "nibbles" in packed:
        return _w4a16_cpu.w4a16_cpu(x, **packed)
    if "words" not in packed:
        y = _backend.run(_w4a16.w4a16, x, packed["weight"], packed["scale"], packed["zero"])
    elif in_parts:
        given = x, packed["words"], packed["scale_zero"]
        return _product(_backend.run(_w4a16.w4a16_parts, *given), x.dtype)
    else:
        y = _backend.run(_w4a16.w4a16_fragments, x, packed["words"], packed["scale_zero"])
    return y if bias is None else y + bias


def cpu_paths() -> dict[str, str]:
    """How each product runs on this CPU, in words; a scheme that is not named runs its meaning."""
    rows = {"int8": _w8a16_int8_cpu.MAX_ROWS_OF_INT8_OP, "int4": _w4a16_cpu.MAX_ROWS_OF_INT4_OP}
    widened = "weights widened at load to bfloat16 (float32 for other activations), torch linear"
    exact = "oneDNN int8 x int8; one token by rows of float32"
    return {
        "dense": "torch linear",
        "w8a8-int8": exact if onednn_int8_is_exact() else "plain torch: oneDNN's int8 saturates here",
        "w8a16-int8": f"torch int8 op up to {rows['int8']} rows of bfloat16, else weights widened per call",
        "w8a8-fp8": widened,
        "w8a8-fp8-static": widened,
        "w8a8-fp8-block": widened,
        "w8a16-fp8": widened,
        "w4a16": f"torch int4 op up to {rows['int4']} rows of bfloat16, else weights unpacked per call",
    }


# --- engine: the paged cache and sampling ------------------------------------------------------------------


def kv_places(slots: Tensor, geometry: Geometry) -> Tensor:
    """What `write_kv` takes for slots [T] int64 (page * PAGE + offset); once per step for all layers."""
    if slots.is_cuda:
        return slots
    return _write_kv_cpu.slot_rows(slots, geometry.num_kv_heads, geometry.page_size)


def write_kv(k: Tensor, v: Tensor, pages: KVPages, places: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `places`, from `kv_places`, of a layer's pages, in place."""
    if k.is_cuda:
        return _backend.run_in_place(_few_pages, _write_kv.write_kv, k, v, pages, places)
    _write_kv_cpu.write_kv_cpu(k, v, pages, places)


def qkv_post(
    qkv: Tensor | Parts,
    pages: KVPages,
    slots: Tensor,
    *,
    rotation: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    bias: Tensor | None,
) -> Tensor:
    """Bias, head norms, rotation and the writing of K and V in one pass, for a GPU: [T, N] -> q [T, Hq, D].

    Slots [T] as in `kv_places`; cos and sin [T, R] as in `rope`. All float32, rounded once.
    """
    data = qkv.sums if isinstance(qkv, Parts) else qkv
    rest: dict[str, Any] = {"rotation": rotation, "norms": norms, "bias": bias, "dtype": qkv.dtype}
    return _backend.run_in_place(_few_pages, _qkv_post.qkv_post, data, pages, slots, **rest)


def _few_pages(*args: Any) -> _backend.Rehearsal:
    """The arguments (..., pages, slots) with a copy of the pages that are touched: all may not fit twice."""
    *data, pages, slots = args
    assert isinstance(pages, KVPages)
    page, offset = slots.clamp(min=0) // pages.k.shape[2], slots.clamp(min=0) % pages.k.shape[2]
    touched, index = page.unique(return_inverse=True)

    def part() -> KVPages:
        k, v, k_scales, v_scales = (None if x is None else _picked(x, touched) for x in pages[:4])
        assert k is not None and v is not None  # noqa: PT018
        return KVPages(k, v, k_scales, v_scales, pages.k_scale, pages.v_scale)

    copy = part()
    return _backend.Rehearsal((*data, copy, index * pages.k.shape[2] + offset), copy, part)


def _picked(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; indexing knows no fp8, but bytes are bytes."""
    return x[rows] if x.element_size() > 1 else x.view(torch.uint8)[rows].view(x.dtype)


def group_rows(batch: PagedBatch, geometry: Geometry) -> Groups:
    """How `paged_attention` will read a step's pages; once per step for all layers of equal geometry."""
    if batch.seq_lens.is_cuda:
        return _backend.run_unchecked(_paged_attention.group_rows, batch, geometry)
    return _paged_attention.group_rows(batch, geometry)


def paged_attention(
    q: Tensor, pages: KVPages, groups: Groups, *, scale: float, softcap: float | None
) -> Tensor:
    """q [T, Hq, D] attends to its own sequence's pages up to itself -> [T, Hq, D] in q's dtype."""
    if q.is_cuda:
        return _backend.run(_attend_by_plan, q, pages, groups, scale=scale, softcap=softcap)
    return _paged_attention.paged_attention(q, pages, groups, scale=scale, softcap=softcap)


@wraps(_paged_attention.paged_attention)  # whose twin is this one's
def _attend_by_plan(q: Tensor, pages: KVPages, groups: Groups, **kwargs: Any) -> Tensor:
    """The meaning, which groups the rows again by itself where they are planned for the kernels."""
    if hasattr(groups, "geometry"):
        groups = _paged_attention.group_rows(groups.batch, groups.geometry)
    return _paged_attention.paged_attention(q, pages, groups, **kwargs)


def token_counts(ids: Tensor, vocab_size: int) -> Tensor:
    """ids [R, L] int64, padded with vocab_size -> how often each token occurs, [R, V] float32."""
    return _sampling.token_counts(ids, vocab_size)


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """logits, seen (bool), counts [R, V]; penalties [R] -> logits [R, V]."""
    if logits.is_cuda:
        return _backend.run(_sampling.apply_penalties, logits, seen, counts, repetition, frequency, presence)
    return _sampling.apply_penalties(logits, seen, counts, repetition, frequency, presence)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [R, V], limits [R] -> logits with -inf for what min_p, top_k and top_p leave out."""
    if logits.is_cuda:
        return _backend.run(_sampling.filter_logits, logits, top_k, top_p, min_p)
    return _sampling.filter_logits(logits, top_k, top_p, min_p)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits [R, V], decided by uniform [R] float64 in [0, 1) -> [R] int64."""
    if logits.is_cuda:
        return _backend.run(_sampling.draw, logits, uniform)
    return _sampling.draw(logits, uniform)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits [R, V], the first of equals -> [R] int64; -1 for NaN."""
    if logits.is_cuda:
        return _backend.run(_fused_sampling.greedy, logits)
    return _fused_sampling.greedy(logits)


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """One token per row of logits [R, V] -> [R] int64, -1 for NaN; temperature 0 is greedy.

    uniform [R] float64 in [0, 1) decides; limits [R] as in `filter_logits`, None where no row has any.
    """
    if logits.is_cuda:
        return _backend.run(_fused_sampling.sample, logits, uniform, temperature, top_k, top_p, min_p)
    return _fused_sampling.sample(logits, uniform, temperature, top_k, top_p, min_p)


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of logits [R, V] at ids [R], ranks from 1, the num_top largest and their ids."""
    if logits.is_cuda:
        # unchecked: among equal logits the twins may rank and name different ids
        return _backend.run_unchecked(_sampling.token_logprobs, logits, ids, num_top)
    return _sampling.token_logprobs(logits, ids, num_top)


def kv_dtype(name: str) -> torch.dtype:
    """The stored dtype that a resolved kv_cache_dtype names ("fp8": e4m3)."""
    return _kv_format.DTYPES[name]
