"""Products that leave the activations as they are: with dense weights, or with weights of 8 or 4 bits.

`bias` and `in_parts` are as in `eight_bit`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from qinfer import backend
from qinfer.kernels import dense as _dense
from qinfer.kernels import panels as _panels
from qinfer.kernels import w4a16 as _w4a16
from qinfer.kernels import w4a16_cpu as _w4a16_cpu
from qinfer.kernels import w8a8_fp8_cpu as _w8a8_fp8_cpu
from qinfer.kernels import w8a16_fp8 as _w8a16_fp8
from qinfer.kernels import w8a16_fp8_cpu as _w8a16_fp8_cpu
from qinfer.kernels import w8a16_int8 as _w8a16_int8
from qinfer.kernels import w8a16_int8_cpu as _w8a16_int8_cpu
from qinfer.ops.forms import Product, whole_or_parts


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], all of one dtype."""
    return _dense.dense(x, weight) if bias is None else functional.linear(x, weight, bias)


def pack_w8a16_int8(weight: Tensor) -> Tensor:
    """Weight int8 [N, K] in the layout that `w8a16_int8` reads on its device."""
    return _panels.to_fragments(weight) if weight.is_cuda else weight


def w8a16_int8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, in_parts: bool = False
) -> Product:
    """x [T, K], weight from `pack_w8a16_int8`, weight_scale [N] in x's dtype -> [T, N] in x's dtype."""
    if x.is_cuda and in_parts:
        parts = backend.run(_w8a16_int8.w8a16_int8_parts, x, weight, weight_scale)
        return whole_or_parts(parts, x.dtype)
    if x.is_cuda:
        return backend.run(_w8a16_int8.w8a16_int8, x, weight, weight_scale, bias)
    return _w8a16_int8_cpu.w8a16_int8_cpu(x, weight, weight_scale)


def pack_w8a16_fp8(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight float8_e4m3fn [N, K] in the form that `w8a16_fp8` reads fastest on its device."""
    return _panels.to_fragments(weight) if weight.is_cuda else _w8a8_fp8_cpu.widen(weight, dtype)


def w8a16_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight from `pack_w8a16_fp8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    if x.is_cuda:
        return backend.run(_w8a16_fp8.w8a16_fp8, x, weight, weight_scale, bias)
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
) -> Product:
    """x [T, K] times the 4-bit weight that `pack_w4a16` made ready -> [T, N] in x's dtype."""
    if "nibbles" in packed:
        return _w4a16_cpu.w4a16_cpu(x, **packed)
    if "words" not in packed:
        y = backend.run(_w4a16.w4a16, x, packed["weight"], packed["scale"], packed["zero"])
    elif in_parts:
        given = x, packed["words"], packed["scale_zero"]
        return whole_or_parts(backend.run(_w4a16.w4a16_parts, *given), x.dtype)
    else:
        y = backend.run(_w4a16.w4a16_fragments, x, packed["words"], packed["scale_zero"])
    return y if bias is None else y + bias
