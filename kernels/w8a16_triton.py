# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products of 16-bit activations and 8-bit weights on a GPU: what int8 and float8 weights share.

    y[t, n] = scale[n] * sum_k x[t, k] * q[n, k] + bias[n]

The tensor cores multiply like by like, so codes must become 16-bit numbers between memory and
multiplication. Element by element that conversion is slower than the memory. Hence the weight lies in
fragments (panels.py), so that each thread loads just the codes that it will multiply, and `widen` makes two
numbers at a time of the bits of two codes, exactly. The weight's rows are the tensor cores' first operand,
which may come from registers.

For thousands of tokens it costs less to widen the whole weight once, and to leave the product to torch.mm.
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
from qinfer.kernels.rows_triton import MEASURED, table_of
from qinfer.kernels.split_k_triton import (
    check,
    fetch_panels,
    launch_options,
    same_code,
    splits_of,
    sum_of_parts,
)
from qinfer.kernels.tiles import Declined, Tile, tile
from qinfer.kernels.w4a16_unpack_triton import pairs_first
from qinfer.kernels.w8a16_quarters_triton import launch_by_quarters, variant_by_quarters
from qinfer.kernels.w8a16_warps_triton import block_rows, by_warps, registers_of
from qinfer.kernels.w8a16_widen_triton import WIDE, widened, widened_tile
from qinfer.kernels.warps_triton import descriptor, descriptor_type


def multiply(
    op: str,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    fp8: bool,
    in_parts: bool = False,
) -> Tensor:
    """x [M, K], weight fragments, weight_scale [N], bias [N] or None -> x's dtype [M, N].

    in_parts: where the tile cuts K, float32 [S, M, N] is returned, which the next kernel adds up over S.
    """
    if weight.dtype is not torch.int32:
        raise Declined(f"a weight of {weight.dtype} in rows; the kernel reads fragments")
    if x.is_cuda and x.dtype not in WIDE:
        raise Declined(f"activations of {x.dtype}")
    x = x if x.stride(-1) == 1 else x.contiguous()
    m, k, n = *x.shape, weight.shape[1]
    check(x, n, x.dtype)
    if m == 0:
        return torch.empty(0, n, dtype=x.dtype, device=x.device)
    entry = tile(op, table_of(x.device), formula, m, n, k, in_parts=in_parts)
    return run(entry, x, weight, weight_scale, bias, fp8, in_parts)


def run(
    entry: Tile,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    fp8: bool,
    in_parts: bool = False,
) -> Tensor:
    """`multiply` with a given tile; WIDEN in it asks for `widened` and torch.mm."""
    if "WIDEN" in entry:
        y = torch.mm(x, widened(weight, weight_scale, x.dtype, x.shape[1], fp8).T)
        return y if bias is None else y + bias
    if "QUARTERS" in entry:
        out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
        launch_by_quarters(entry, x, weight, weight_scale, bias, out, fp8)
        return out
    m, k, n, splits = *x.shape, weight.shape[1], entry["SPLITS"]
    lead = [splits] if splits > 1 else []
    out = torch.empty(*lead, m, n, device=x.device, dtype=torch.float32 if lead else x.dtype)
    tiles = triton.cdiv(m, entry["BM"]) * triton.cdiv(n, entry["BN"])
    options = options_of(entry, None if lead else bias, x.is_cuda, fp8)
    given = (weight_scale, weight_scale if bias is None else bias, out)
    if "BY_WARPS" in entry:
        codes = descriptor(weight.view(-1, 32), [block_rows(entry["BN"]), 32])
        tokens = descriptor(x, [entry["BM"], 128])
        by_warps[(tiles, splits)](tokens, codes, *given, m, n, weight.shape[0], **options)
    else:
        few = entry["BM"] == 8
        rows = x if few else TensorDescriptor.from_tensor(x, [entry["BM"], min(entry["BK"], 128)])
        options |= {"EVEN": k % 128 == 0, "WIDE": WIDE.get(x.dtype, tl.float32), "ASM": x.is_cuda}
        product[(tiles, splits)](rows, weight, *given, m, n, k, x.stride(0), **{"AHEAD": 0, **options})
    if not lead or in_parts:
        return out
    return sum_of_parts(out, bias, x.dtype, entry["EARLY"] > 0)


def options_of(entry: Tile, bias: Tensor | None, on_gpu: bool, fp8: bool) -> dict[str, Any]:
    """A table's entry as constants and launch options of its kernel."""
    options = launch_options(entry, bias, on_gpu, FP8=fp8)
    if "BY_WARPS" in entry:
        options |= {"num_warps": 4, **registers_of(entry["BM"], entry["BN"])}
    return {name: value for name, value in options.items() if name not in ("SPLITS", "BY_WARPS")}


def formula(m: int, n: int, k: int) -> Tile:
    """Tiles that are good for most shapes: what the measured tables of an H200 have in common."""
    if m > 2048:
        return {"WIDEN": 1}
    if m > 128:
        shape = {"BM": 256, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4}
    else:
        rows = max(16, triton.next_power_of_2(m))
        shape = {"BM": rows, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
    tiles = triton.cdiv(n, shape["BN"]) * triton.cdiv(m, shape["BM"])
    splits = splits_of(tiles * shape["BM"] // 64 if m > 128 else tiles, triton.cdiv(k, shape["BK"]))
    return {**shape, "SPLITS": splits, "EARLY": int(splits > 1)}


def offline_variants() -> Iterator[Variant]:
    """The tables' tiles, for Llama-8B's weights, and the formula's, both kinds of codes; few in float16."""
    shapes = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096), (896, 4864))
    cases = [(m, n, k, "bf16") for n, k in shapes for m in (1, 16, 32, 64, 128, 256, 512, 1024, 4096)]
    found = {
        (op, dtype, tuple(sorted(same_code(tile(op, MEASURED, formula, m, n, k)).items())))
        for op in ("w8a16_int8", "w8a16_fp8")
        for m, n, k, dtype in [*cases, (16, 4096, 4096, "fp16"), (256, 4096, 4096, "fp16")]
    }
    for op, dtype, items in sorted(found):
        entry = dict(items)
        if "QUARTERS" in entry:
            yield variant_by_quarters(op, entry, dtype)
        elif "WIDEN" not in entry:
            yield _variant(op, dtype, entry)


def _variant(op: str, dtype: str, entry: dict[str, Any]) -> Variant:
    warps, few = "BY_WARPS" in entry, entry["BM"] == 8
    kernel = by_warps if warps else product
    types = dict.fromkeys(("M", "N", "K", "x_stride", "steps", "AHEAD"), "i32")
    types |= {"w": "*i32", "scale": "*fp32", "bias": "*fp32"}
    types["x"] = f"*{dtype}" if few else f"tensordesc<{dtype}{[entry['BM'], min(entry.get('BK', 128), 128)]}>"
    types["out"] = "*fp32" if entry["SPLITS"] > 1 else f"*{dtype}"
    options = options_of(entry, None, True, op == "w8a16_fp8")
    if warps:
        types["x"] = descriptor_type(dtype, [entry["BM"], 128])
        types["w"] = descriptor_type("i32", [block_rows(entry["BN"]), 32])
    else:
        options |= {"EVEN": True, "WIDE": tl.bfloat16 if dtype == "bf16" else tl.float16, "ASM": True}
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    launch: dict[str, Any] = {name: value for name, value in options.items() if not name.isupper()}
    label = " ".join([op, dtype, *(f"{name}={value}" for name, value in entry.items())])
    aligned = tuple(name for name in ("N", "K", "x_stride") if name in signature)
    return Variant(label, kernel, signature, constants, launch, aligned, wants_tensor_cores=True)


@triton.jit
def multiplications_done():
    """Waits until the matrix instructions that are under way have read their registers.

    Triton (3.6 and 3.9) lets them run on while the next step's operand is written to the very registers that
    they still read, which gave wrong sums from 128 tokens on, where they run longest.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M", "AHEAD"])
def product(x, w, scale, bias, out, M, N, K, x_stride, AHEAD, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr, BIAS: tl.constexpr, FP8: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
            ASM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """x [M, K]: a descriptor in blocks of [BM, min(BK, 128)]; w: fragments, int32 [ceil(K / 128), N, 32].

    Grid (tiles, parts); BK is 64, 128 or 256. Of parts more than one, out is float32 [parts, M, N]. AHEAD:
    panels of the weight that a program asks the L2 cache for before it waits for x.
    BM = 8, for which x is a pointer, takes the older tensor instruction, which is content with 8 columns.
    """
    FEW: tl.constexpr = BM == 8
    FACTOR: tl.constexpr = 256.0 if FP8 and ASM and WIDE.is_fp16() else 1.0
    LOAD: tl.constexpr = min(BK, 128)
    num_m = tl.cdiv(M, BM)
    steps = tl.cdiv(K, BK)
    part, parts = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) % num_m * BM
    col = tl.program_id(0) // num_m * BN
    first, last = part * steps // parts, (part + 1) * steps // parts
    if EARLY:
        if EARLY == 1:
            cuda.gdc_launch_dependents()
        end = tl.minimum(tl.cdiv(last * BK, 128), tl.cdiv(K, 128))
        fetch_panels(w.to(tl.pointer_type(tl.int8), bitcast=True), first * BK // 128, end, AHEAD, N, col, BN)
        cuda.gdc_wait()
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    words_of_row = w + tl.minimum(cols, N - 1)[:, None] * 32 + tl.arange(0, LOAD // 4)[None, :]
    inputs = tl.arange(0, LOAD)
    xp = x
    if FEW:
        xp = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(first, last):
        for i in tl.static_range(BK // LOAD):
            load = step * (BK // LOAD) + i
            if FEW:
                inside = (rows < M)[:, None]
                if not EVEN:
                    inside = inside & (load * LOAD + inputs < K)[None, :]
                a = tl.load(xp + load * LOAD, mask=inside, other=0.0)
            else:
                a = x.load([row, load * LOAD])
            panel = tl.cast(load // (128 // LOAD), tl.int64) * (N * 32)
            words = tl.load(words_of_row + panel + load % (128 // LOAD) * (LOAD // 4))
            if FEW:
                acc = tl.dot(widened_tile(words, FP8, WIDE, ASM, True), pairs_first(a.T), acc)
            else:
                if ASM:
                    multiplications_done()
                acc = tl.dot(widened_tile(words, FP8, WIDE, ASM), a.T, acc)
    if EARLY == 2:
        cuda.gdc_launch_dependents()
    y = tl.trans(acc) * (tl.load(scale + cols, mask=cols < N, other=0.0).to(tl.float32) * FACTOR)[None, :]
    if BIAS:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out + (part.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])
