"""One typed function per op; the only importer of kernels.

Each op has one meaning in plain torch (qinfer/kernels/<op>.py). Where a device has something faster that
gives the same result, the choice is made here, by shape and by rules that were measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels import dense as _dense
from qinfer.kernels import quantize_per_token as _quantize_per_token
from qinfer.kernels import w4a16 as _w4a16
from qinfer.kernels import w8a8_fp8 as _w8a8_fp8
from qinfer.kernels import w8a8_int8 as _w8a8_int8
from qinfer.kernels import w8a16_int8 as _w8a16_int8

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


def pack_w8a8_int8(weight: Tensor) -> Tensor:
    """Weight int8 [N, K] in the layout that `w8a8_int8` reads fastest on its device."""
    return weight


def w8a8_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `pack_w8a8_int8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    return _w8a8_int8.w8a8_int8(x, weight, weight_scale)


def w8a16_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale [N] in x's dtype -> [T, N] in x's dtype."""
    return _w8a16_int8.w8a16_int8(x, weight, weight_scale)


def widen_w8a8_fp8(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight float8_e4m3fn [N, K] in the form that `w8a8_fp8` reads fastest on its device."""
    return weight


def w8a8_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `widen_w8a8_fp8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    return _w8a8_fp8.w8a8_fp8(x, weight, weight_scale)


def pack_w4a16(weight: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """Arguments of `w4a16` on the tensors' device: weight uint8 [N, K/2], scale and zero uint8 [N, G]."""
    return {"weight": weight, "scale": scale, "zero": zero}


def w4a16(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [T, K] times the 4-bit weight that `pack_w4a16` made ready -> [T, N] in x's dtype."""
    return _w4a16.w4a16(x, weight, scale, zero)
