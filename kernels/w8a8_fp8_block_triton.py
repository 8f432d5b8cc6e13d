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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from qinfer.kernels.offline import Variant
from qinfer.kernels.panels import WIDTH
from qinfer.kernels.rows_triton import MEASURED, row_scale, table_of
from qinfer.kernels.rows_triton import codes as codes_of
from qinfer.kernels.split_k_triton import (
    check,
    launch_options,
    num_multiprocessors,
    same_code,
    splits_of,
    sum_of_parts,
)
from qinfer.kernels.tiles import Declined, Tile, tile
from qinfer.kernels.w8a8_block_warps_triton import PIECE, blocks_by_warps
from qinfer.kernels.warps_triton import descriptor, descriptor_type


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
    if weight.dim() != 3:
        raise Declined(f"a weight {list(weight.shape)} in rows; the kernel reads panels")
    m, k, n = *codes.shape, weight.shape[1]
    check(codes, n, dtype)
    if m == 0:
        return torch.empty(0, n, dtype=dtype, device=codes.device)
    if dtype is torch.float32:  # twice the shared memory for results: only the smaller tiles leave it
        entry = formula(min(m, 256), n, k)
    else:
        entry = tile("w8a8_fp8_block", table_of(codes.device), formula, m, n, k)
    return run(entry, codes, scale, weight, weight_scale.contiguous(), dtype, bias)


def run(
    entry: Tile,
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """`w8a8_fp8_block_codes` with a given tile; STAGES in it asks for `blocks_by_warps`."""
    m, k, n = *codes.shape, weight.shape[1]
    given = (scale, weight_scale, weight_scale if bias is None else bias)
    sizes = (m, n, k, scale.stride(0), scale.stride(1))
    options = launch_options(entry, bias, codes.is_cuda)
    panels = weight.view(-1, WIDTH)
    if "STAGES" in entry:
        out = torch.empty(m, n, dtype=dtype, device=codes.device)
        x, w = descriptor(codes, [128, WIDTH]), descriptor(panels, [256, WIDTH])
        tiles = triton.cdiv(m, 128) * triton.cdiv(n, 256)
        programs = min(tiles, num_multiprocessors(codes.device))
        blocks_by_warps[(programs,)](x, w, *given, descriptor(out, [64, PIECE]), *sizes, **options)
        return out
    splits = entry["SPLITS"]
    lead = [splits] if splits > 1 else []
    out = torch.empty(*lead, m, n, device=codes.device, dtype=torch.float32 if lead else dtype)
    x = TensorDescriptor.from_tensor(codes, [entry["BM"], WIDTH])
    w = TensorDescriptor.from_tensor(panels, [entry["BN"], WIDTH])
    tiles = triton.cdiv(m, entry["BM"]) * triton.cdiv(n, entry["BN"])
    block_product[(tiles, splits)](x, w, *given, out, *sizes, **options)
    return sum_of_parts(out, bias, dtype, entry["EARLY"] > 0) if splits > 1 else out


def formula(m: int, n: int, k: int) -> Tile:
    """Tiles that are good for most shapes: what the measured tables of an H200 have in common."""
    if m > 256:
        return {"STAGES": 4, "GROUP": 16, "EARLY": 0, "num_warps": 4}
    rows = max(16, triton.next_power_of_2(m)) if m <= 128 else 128
    splits = splits_of(triton.cdiv(n, 64) * triton.cdiv(m, rows), triton.cdiv(k, 128))
    shape = {"BM": rows, "BN": 64, "SWAP": 1, "SPLITS": splits, "EARLY": int(splits > 1)}
    return {**shape, "num_warps": 4, "num_stages": 4}


def offline_variants() -> Iterator[Variant]:
    """The tables' tiles for Llama-8B's weights, and the formula's."""
    found = {
        tuple(sorted(same_code(tile("w8a8_fp8_block", MEASURED, formula, m, n, k)).items()))
        for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (896, 4864))
        for m in (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
    }
    for items in sorted(found):
        yield _variant(dict(items))


def _variant(entry: dict[str, Any]) -> Variant:
    by_warp = "STAGES" in entry
    kernel = blocks_by_warps if by_warp else block_product
    types = dict.fromkeys(("M", "N", "K", "stride_g"), "i32")
    types |= dict.fromkeys(("x_scale", "w_scale", "bias"), "*fp32")
    for name, rows in (("x", entry.get("BM", 128)), ("w", entry.get("BN", 256))):
        block = [rows, WIDTH]
        types[name] = descriptor_type("fp8e4nv", block) if by_warp else f"tensordesc<fp8e4nv{block}>"
    types["out"] = descriptor_type("bf16", [64, PIECE]) if by_warp else "*bf16"
    if entry.get("SPLITS", 1) > 1:
        types["out"] = "*fp32"
    options = launch_options(entry, None, True, stride_t=1)
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    launch = {name: value for name, value in options.items() if name not in constants}
    label = " ".join(["w8a8_fp8_block", *(f"{name}={value}" for name, value in entry.items())])
    return Variant(label, kernel, signature, constants, launch, ("N", "K"), wants_tensor_cores=True)


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


@triton.jit(do_not_specialize=["M"])
def block_product(x, w, x_scale, w_scale, bias, out, M, N, K, stride_t, stride_g, BM: tl.constexpr,
                  BN: tl.constexpr, SWAP: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
                  EARLY: tl.constexpr):  # fmt: skip
    """As `product` of w8a8_triton.py, BK = 128; x_scale [M, K / 128] by its strides, w_scale row-major."""
    num_m = tl.cdiv(M, BM)
    groups = tl.cdiv(K, 128)
    row = tl.program_id(0) % num_m * BM
    col = tl.program_id(0) // num_m * BN
    if EARLY:
        if EARLY == 1:
            cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    first = tl.program_id(1) * groups // SPLITS
    last = (tl.program_id(1) + 1) * groups // SPLITS
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
