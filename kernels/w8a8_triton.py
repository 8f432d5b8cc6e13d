# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of 8-bit codes on a GPU with scales of rows: what int8 and float8 ops share.

    y[t, n] = sum_k x[t, k] * w[n, k] * w_scale[n] * x_scale[t] + bias[n]

`product` is for few tokens, `by_warps` (w8a8_warps_triton.py) for many; w8a8_launch_triton.py launches them.
A sum of int8 products is exact. A sum of float8 products is kept by Hopper's tensor cores with about 14 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.offline import Variant
from qinfer.kernels.split_k_triton import fetch_panels, splits_of
from qinfer.kernels.tiles import Tile
from qinfer.kernels.w8a8_launch_triton import Product
from qinfer.kernels.w8a8_warps_triton import by_warps


def formula(m: int, n: int, k: int) -> Tile:
    """Tiles that are good for most shapes: what the measured tables of an H200 have in common."""
    if m > 256:
        shape = {"BM": 128, "BN": 256, "SPLITS": 1, "EARLY": 0}
        return {**shape, "STAGES": 4, "GROUP": 16, "num_warps": 4}
    rows = max(16, triton.next_power_of_2(m)) if m <= 128 else 128
    tiles = triton.cdiv(n, 64) * triton.cdiv(m, rows)
    splits = splits_of(tiles, triton.cdiv(k, 256))
    shape = {"BM": rows, "BN": 64, "BK": 256, "SWAP": 1, "SPLITS": splits, "EARLY": int(splits > 1)}
    return {**shape, "num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=["M", "AHEAD"])
def product(x, w, panels, x_scale, w_scale, bias, out, M, N, K, stride_t, AHEAD, BM: tl.constexpr,
            BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    """x [M, K] in blocks of [BM, 128], w [ceil(K / 128) * N, 128] in blocks of [BN, 128]: descriptors.

    panels: the weight again, of which a program asks the L2 cache for AHEAD panels before it waits for x.
    Grid (tiles, SPLITS). SPLITS > 1: out is float32 [SPLITS, M, N] and gets no bias. SWAP: the weight is the
    tensor cores' first operand, which has 64 rows at least, so that few tokens need not be padded to as many.
    """
    ACC: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    num_m = tl.cdiv(M, BM)
    steps = tl.cdiv(K, BK)
    row = tl.program_id(0) % num_m * BM
    col = tl.program_id(0) // num_m * BN
    first = tl.program_id(1) * steps // SPLITS
    last = (tl.program_id(1) + 1) * steps // SPLITS
    if EARLY:
        if EARLY == 1:
            cuda.gdc_launch_dependents()
        fetch_panels(panels, first * (BK // 128), tl.minimum(last * (BK // 128), tl.cdiv(K, 128)), AHEAD, N,
                     col, BN)  # fmt: skip
        cuda.gdc_wait()
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), ACC)
    for step in range(first, last):
        for i in tl.static_range(BK // 128):
            panel = step * (BK // 128) + i
            a = x.load([row, panel * 128])
            b = w.load([panel * N + col, 0])
            if SWAP:
                acc = tl.dot(b, a.T, acc, out_dtype=ACC)
            else:
                acc = tl.dot(a, b.T, acc, out_dtype=ACC)
    if EARLY == 2:
        cuda.gdc_launch_dependents()
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    y = tl.trans(acc).to(tl.float32) if SWAP else acc.to(tl.float32)
    y = y * tl.load(w_scale + cols, mask=cols < N, other=0.0)[None, :]
    y = y * tl.load(x_scale + rows * stride_t, mask=rows < M, other=0.0)[:, None]
    if BIAS and SPLITS == 1:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def _stride(scale: Tensor) -> tuple[int]:
    """Of a token's scale to the next; 0 where all tokens have one."""
    return (0 if scale.numel() == 1 else 1,)


multiply = Product(product, by_warps, formula, _stride)


def offline_variants() -> Iterator[Variant]:
    """Of both kinds of codes."""
    yield from multiply.variants("w8a8_int8", "w8a8_fp8")
    yield from multiply.gated_variants("w8a8_int8", "w8a8_fp8")
