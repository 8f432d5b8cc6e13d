# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of float8 codes with a scale for every 128x128 block of the weight: the twin of w8a8_fp8_block.py.

The inner sum over 128 columns is one step of the tensor cores; its result is multiplied by the two scales and
added in float32, so no more than 128 products are ever summed in the tensor cores' 14 bits. The scales of the
next step are loaded while this one multiplies. Otherwise as w8a8_triton.py. The scales of the activations lie
transposed, [ceil(K / 128), T], so that neighbouring tokens' are read together; as seen from outside they are
[T, ceil(K / 128)].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.offline import Variant
from qinfer.kernels.panels import WIDTH
from qinfer.kernels.rows_triton import codes as codes_of
from qinfer.kernels.rows_triton import row_scale
from qinfer.kernels.split_k_triton import fetch_panels, splits_of
from qinfer.kernels.tiles import Tile
from qinfer.kernels.w8a8_block_warps_triton import blocks_by_warps
from qinfer.kernels.w8a8_launch_triton import Product


def w8a8_fp8_block(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    codes, scale = fp8_per_group(x)
    return w8a8_fp8_block_codes(codes, scale, weight, weight_scale, x.dtype, bias)


def w8a8_fp8_block_codes(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """As its meaning; fastest where scale is the transpose of a contiguous tensor, as of `fp8_per_group`."""
    return multiply("w8a8_fp8_block", codes, scale, weight, weight_scale.contiguous(), dtype, bias)


def formula(m: int, n: int, k: int) -> Tile:
    """Tiles that are good for most shapes: what the measured tables of an H200 have in common."""
    if m > 256:
        shape = {"BM": 128, "BN": 256, "SPLITS": 1, "EARLY": 0}
        return {**shape, "STAGES": 4, "GROUP": 16, "num_warps": 4}
    rows = max(16, triton.next_power_of_2(m)) if m <= 128 else 128
    splits = splits_of(triton.cdiv(n, 64) * triton.cdiv(m, rows), triton.cdiv(k, 128))
    shape = {"BM": rows, "BN": 64, "SWAP": 1, "SPLITS": splits, "EARLY": int(splits > 1)}
    return {**shape, "num_warps": 4, "num_stages": 4}


def fp8_per_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """As its meaning; the scale is the transpose of a contiguous tensor."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(triton.cdiv(columns, WIDTH), rows, device=x.device).T
    if rows:
        grid = (rows, triton.cdiv(columns, 8 * WIDTH))
        quantize_groups[grid](x, codes, scale, columns, x.stride(0), *scale.stride(), num_warps=4)
    return codes, scale


@triton.jit
def quantize_groups(x, out, scales, columns, stride, stride_t, stride_g):
    """Eight groups of 128 columns of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * 8 + tl.arange(0, 8)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = row_scale(values, out.dtype.element_ty)
    tl.store(out + row * columns + at, codes_of(values, scale, out.dtype.element_ty), mask=at < columns)
    tl.store(scales + row * stride_t + group * stride_g, scale, mask=group * 128 < columns)


@triton.jit
def _scales(x_scale, w_scale, rows, M, group, stride_t, stride_g):
    return tl.load(x_scale + rows * stride_t + group * stride_g, mask=rows < M, other=0.0) * tl.load(
        w_scale + group
    )


@triton.jit(do_not_specialize=["M", "AHEAD"])
def block_product(x, w, panels, x_scale, w_scale, bias, out, M, N, K, stride_t, stride_g, AHEAD,
                  BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, SPLITS: tl.constexpr,
                  BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """As `product` of w8a8_triton.py, BK = 128; x_scale [M, K / 128] by its strides, w_scale row-major."""
    num_m = tl.cdiv(M, BM)
    groups = tl.cdiv(K, 128)
    row = tl.program_id(0) % num_m * BM
    col = tl.program_id(0) // num_m * BN
    first = tl.program_id(1) * groups // SPLITS
    last = (tl.program_id(1) + 1) * groups // SPLITS
    if EARLY:
        if EARLY == 1:
            cuda.gdc_launch_dependents()
        fetch_panels(panels, first, last, AHEAD, N, col, BN)
        cuda.gdc_wait()
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    w_scale += col // 128 * groups
    scales = _scales(x_scale, w_scale, rows, M, first, stride_t, stride_g)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for group in range(first, last):
        a = x.load([row, group * 128])
        b = w.load([group * N + col, 0])
        coming = _scales(x_scale, w_scale, rows, M, tl.minimum(group + 1, last - 1), stride_t, stride_g)
        if SWAP:
            acc += tl.dot(b, a.T) * scales[None, :]
        else:
            acc += tl.dot(a, b.T) * scales[:, None]
        scales = coming
    if EARLY == 2:
        cuda.gdc_launch_dependents()
    y = tl.trans(acc) if SWAP else acc
    if BIAS and SPLITS == 1:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


multiply = Product(block_product, blocks_by_warps, formula, Tensor.stride)


def offline_variants() -> Iterator[Variant]:
    return multiply.variants("w8a8_fp8_block")
