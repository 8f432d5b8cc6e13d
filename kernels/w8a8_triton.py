# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of 8-bit codes on a GPU: what the w8a8 ops share, int8 and float8 alike.

    y[t, n] = sum_k x[t, k] * w[n, k] * w_scale[n] * x_scale[t] + bias[n]

The weight lies in panels (panels.py), so that a tile is one run of memory. Both operands go from memory to
shared memory by the tensor memory accelerator (descriptors) and from there to the tensor cores, which want
8-bit operands along K. `product` is for few tokens, where memory is what limits, and may cut K; `by_warps`
(w8a8_warps_triton.py) is for many.

A sum of int8 products is exact. A sum of float8 products is kept by Hopper's tensor cores with about 14 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from qinfer.kernels.offline import Variant
from qinfer.kernels.panels import WIDTH
from qinfer.kernels.rows_triton import MEASURED, table_of
from qinfer.kernels.split_k_triton import (
    check,
    launch_options,
    num_multiprocessors,
    same_code,
    splits_of,
    sum_of_parts,
)
from qinfer.kernels.tiles import Declined, Tile, tile
from qinfer.kernels.w8a8_warps_triton import by_warps
from qinfer.kernels.warps_triton import descriptor, descriptor_type


def multiply(
    op: str,
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    in_parts: bool = False,
) -> Tensor:
    """codes [M, K], scale [M, 1] or [1], weight panels, weight_scale [N], bias [N] or None -> `dtype` [M, N].

    in_parts: where the tile cuts K, float32 [S, M, N] is returned, which the next kernel adds up over S.
    """
    if weight.dim() != 3:
        raise Declined(f"a weight {list(weight.shape)} in rows; the kernel reads panels")
    m, k, n = *codes.shape, weight.shape[1]
    check(codes, n, dtype)
    if m == 0:
        return torch.empty(0, n, dtype=dtype, device=codes.device)
    if dtype is torch.float32:  # twice the shared memory for results: only the smaller tiles leave it
        entry = formula(min(m, 256), n, k)
    else:
        entry = tile(op, table_of(codes.device), formula, m, n, k)
    return run(entry, codes, scale, weight, weight_scale, dtype, bias, in_parts)


def run(
    entry: Tile,
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    in_parts: bool,
) -> Tensor:
    """`multiply` with a given tile; STAGES in it asks for `by_warps`."""
    m, k, n, splits = *codes.shape, weight.shape[1], entry["SPLITS"]
    stride = 0 if scale.numel() == 1 else 1
    out = torch.empty(
        *([splits] if splits > 1 else []), m, n, device=codes.device, dtype=None if splits > 1 else dtype
    )
    given = (scale, weight_scale, weight_scale if bias is None else bias)
    tiles = triton.cdiv(m, entry["BM"]) * triton.cdiv(n, entry["BN"])
    options = launch_options(entry, bias, codes.is_cuda, INT=codes.dtype is torch.int8)
    if "STAGES" in entry:
        x = descriptor(codes, [entry["BM"], WIDTH])
        w = descriptor(weight.view(-1, WIDTH), [entry["BN"], WIDTH])
        target = out if splits > 1 else descriptor(out, [entry["BM"] // 2, entry["BN"]])
        programs = min(tiles * splits, num_multiprocessors(codes.device))
        by_warps[(programs,)](x, w, *given, target, m, n, k, stride, **options)
    else:
        x = TensorDescriptor.from_tensor(codes, [entry["BM"], WIDTH])
        w = TensorDescriptor.from_tensor(weight.view(-1, WIDTH), [entry["BN"], WIDTH])
        product[(tiles, splits)](x, w, *given, out, m, n, k, stride, **options)
    if splits == 1 or in_parts:
        return out
    return sum_of_parts(out, bias, dtype, entry["EARLY"] > 0)


def formula(m: int, n: int, k: int) -> Tile:
    """Tiles that are good for most shapes: what the measured tables of an H200 have in common."""
    if m > 256:
        shape = {"BM": 128, "BN": 256, "SPLITS": 1, "EARLY": 0}
        return {**shape, "STAGES": 3, "GROUP": 16, "num_warps": 4}
    rows = max(16, triton.next_power_of_2(m)) if m <= 128 else 128
    tiles = triton.cdiv(n, 64) * triton.cdiv(m, rows)
    splits = splits_of(tiles, triton.cdiv(k, 256))
    shape = {"BM": rows, "BN": 64, "BK": 256, "SWAP": 1, "SPLITS": splits, "EARLY": int(splits > 1)}
    return {**shape, "num_warps": 4, "num_stages": 4}


def offline_variants() -> Iterator[Variant]:
    """The tables' tiles for Llama-8B's weights, and the formula's, of both kinds of codes."""
    found = {
        (op, tuple(sorted(same_code(tile(op, MEASURED, formula, m, n, k)).items())))
        for op in ("w8a8_int8", "w8a8_fp8")
        for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (896, 4864))
        for m in (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
    }
    for op, items in sorted(found):
        yield _variant(op, dict(items))


def _variant(op: str, entry: dict[str, Any]) -> Variant:
    element = "i8" if op == "w8a8_int8" else "fp8e4nv"
    by_warp = "STAGES" in entry
    kernel = by_warps if by_warp else product
    types = dict.fromkeys(("M", "N", "K"), "i32") | dict.fromkeys(("x_scale", "w_scale", "bias"), "*fp32")
    for name, rows in (("x", entry["BM"]), ("w", entry["BN"])):
        block = [rows, WIDTH]
        types[name] = descriptor_type(element, block) if by_warp else f"tensordesc<{element}{block}>"
    types["out"] = "*fp32" if entry["SPLITS"] > 1 else "*bf16"
    if by_warp and entry["SPLITS"] == 1:
        types["out"] = descriptor_type("bf16", [entry["BM"] // 2, entry["BN"]])
    options = launch_options(entry, None, True, INT=element == "i8", x_scale_stride=1)
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    launch = {name: value for name, value in options.items() if name not in constants}
    label = " ".join([op, *(f"{name}={value}" for name, value in entry.items())])
    return Variant(label, kernel, signature, constants, launch, ("N", "K"), wants_tensor_cores=True)


@triton.jit(do_not_specialize=["M"])
def product(x, w, x_scale, w_scale, bias, out, M, N, K, x_scale_stride, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr, SWAP: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, INT: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    """x [M, K] in blocks of [BM, 128], w [ceil(K / 128) * N, 128] in blocks of [BN, 128]: descriptors.

    Grid (tiles, SPLITS). SPLITS > 1: out is float32 [SPLITS, M, N] and gets no bias. SWAP: the weight is the
    tensor cores' first operand, which has 64 rows at least, so that few tokens need not be padded to as many.
    """
    ACC: tl.constexpr = tl.int32 if INT else tl.float32
    num_m = tl.cdiv(M, BM)
    steps = tl.cdiv(K, BK)
    row = tl.program_id(0) % num_m * BM
    col = tl.program_id(0) // num_m * BN
    if EARLY:
        if EARLY == 1:
            cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), ACC)
    for step in range(tl.program_id(1) * steps // SPLITS, (tl.program_id(1) + 1) * steps // SPLITS):
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
    y = y * tl.load(x_scale + rows * x_scale_stride, mask=rows < M, other=0.0)[:, None]
    if BIAS and SPLITS == 1:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])
