"""Products of 8-bit activations and 8-bit weights, and how activations get to 8 bits.

On a GPU a product takes a bias [N], which joins its float32 sums before they are rounded. `in_parts`: who
takes the result may get `Parts`; then there is no bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qinfer import backend
from qinfer.kernels import gated_product as _gated_product
from qinfer.kernels import int8_row_cpu as _int8_row_cpu
from qinfer.kernels import panels as _panels
from qinfer.kernels import quantize_per_token as _quantize_per_token
from qinfer.kernels import w8a8_fp8 as _w8a8_fp8
from qinfer.kernels import w8a8_fp8_block as _w8a8_fp8_block
from qinfer.kernels import w8a8_fp8_block_cpu as _w8a8_fp8_block_cpu
from qinfer.kernels import w8a8_fp8_cpu as _w8a8_fp8_cpu
from qinfer.kernels import w8a8_int8 as _w8a8_int8
from qinfer.kernels import w8a8_int8_cpu as _w8a8_int8_cpu
from qinfer.kernels.int8_row_cpu import Int8Row
from qinfer.ops.forms import Activations, Codes, Product, whole_or_parts


def int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes int8 [T, K] and scale float32 [T, 1] = absmax / 127."""
    if x.is_cuda:
        return backend.run(_quantize_per_token.int8_per_token, x)
    return _quantize_per_token.int8_per_token(x)


def fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, 1] = absmax / 448."""
    if x.is_cuda:
        return backend.run(_quantize_per_token.fp8_per_token, x)
    return _quantize_per_token.fp8_per_token(x)


def fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Codes float8_e4m3fn [T, K] of x [T, K] on the grid of scale float32 [1]; what exceeds it saturates."""
    if x.is_cuda:
        return backend.run(_w8a8_fp8.fp8_static, x, scale)
    return _w8a8_fp8.fp8_static(x, scale)


def fp8_per_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, ceil(K/128)] = absmax of 128 / 448."""
    return _w8a8_fp8_block.fp8_per_group(x)


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
            return whole_or_parts(backend.run(_w8a8_int8.w8a8_int8_parts, *given), x.dtype)
        return backend.run(_w8a8_int8.w8a8_int8_codes, *given, bias)
    return _w8a8_int8_cpu.w8a8_int8_cpu(x, weight, weight_scale)


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
) -> Product:
    """x [T, K], weight from `pack_w8a8_fp8`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    if isinstance(x, Tensor) and x.is_cuda:
        x = Codes(*fp8_per_token(x), x.dtype)
    if isinstance(x, Codes):
        given = x.values, x.scale, weight, weight_scale, x.dtype
        if in_parts:
            return whole_or_parts(backend.run(_w8a8_fp8.w8a8_fp8_parts, *given), x.dtype)
        return backend.run(_w8a8_fp8.w8a8_fp8_codes, *given, bias)
    assert isinstance(x, Tensor)
    return _w8a8_fp8_cpu.w8a8_fp8_cpu(x, weight, weight_scale)


def gated_product(
    codes: torch.dtype | None, x: Activations, weight: Tensor, weight_scale: Tensor, *, gelu: bool
) -> Activations:
    """act(gate) * up [T, I], for a product that wants `codes`: see `add_rms_norm_to`. On a GPU only.

    x [T, K]; weight from `pack_w8a8_int8` or `pack_w8a8_fp8` and weight_scale float32 [2 I], both with gate
    and up in turns of TURN rows.
    """
    if isinstance(x, Tensor):
        x = Codes(*(int8_per_token if weight.dtype is torch.int8 else fp8_per_token)(x), x.dtype)
    assert isinstance(x, Codes)
    given = x.values, x.scale, weight, weight_scale, x.dtype
    if codes is None:
        return backend.run(_gated_product.gated, *given, gelu=gelu)
    to_codes = _gated_product.gated_to_int8 if codes is torch.int8 else _gated_product.gated_to_fp8
    return Codes(*backend.run(to_codes, *given, gelu=gelu), x.dtype)


def w8a8_fp8_static(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [T, K], weight from `pack_w8a8_fp8`, weight_scale float32 [N], input_scale float32 [1] -> [T, N]."""
    if x.is_cuda:
        return backend.run(_w8a8_fp8.w8a8_fp8_static, x, weight, weight_scale, input_scale, bias)
    return _w8a8_fp8_cpu.w8a8_fp8_static_cpu(x, weight, weight_scale, input_scale)


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
        return backend.run(_w8a8_fp8_block.w8a8_fp8_block, x, packed["weight"], packed["weight_scale"], bias)
    return _w8a8_fp8_block_cpu.w8a8_fp8_block_cpu(x, packed["weight"])
