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
from qinfer.kernels.split_k_triton import check, launch_options, same_code, splits_of, sum_of_parts
from qinfer.kernels.tiles import Declined, Tile, tile

WIDE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    entry = tile(op, table_of(x.device), formula, m, n, k)
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
    m, k, n, splits = *x.shape, weight.shape[1], entry["SPLITS"]
    lead = [splits] if splits > 1 else []
    out = torch.empty(*lead, m, n, device=x.device, dtype=torch.float32 if lead else x.dtype)
    rows = TensorDescriptor.from_tensor(x, [entry["BM"], min(entry["BK"], 128)])
    tiles = triton.cdiv(m, entry["BM"]) * triton.cdiv(n, entry["BN"])
    options = launch_options(
        entry, bias, x.is_cuda, FP8=fp8, WIDE=WIDE.get(x.dtype, tl.float32), ASM=x.is_cuda
    )
    given = (rows, weight, weight_scale, weight_scale if bias is None else bias, out)
    product[(tiles, splits)](*given, m, n, k, **options)
    if not lead or in_parts:
        return out
    return sum_of_parts(out, bias, x.dtype, entry["EARLY"] > 0)


def widened(weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, columns: int, fp8: bool) -> Tensor:
    """The weight [N, columns] as `dtype`, codes times scale, rounded once."""
    n = weight.shape[1]
    out = torch.empty(n, columns, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(columns, 128), triton.cdiv(n, 32))
    widen_rows[grid](
        weight,
        weight_scale,
        out,
        n,
        columns,
        BN=32,
        FP8=fp8,
        WIDE=WIDE.get(dtype, tl.float32),
        ASM=weight.is_cuda,
        num_warps=4,
    )
    return out


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
    """The tables' tiles for Llama-8B's weights, and the formula's, both kinds of codes; few in float16."""
    shapes = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (896, 4864))
    cases = [(m, n, k, "bf16") for n, k in shapes for m in (1, 16, 32, 64, 128, 256, 512, 1024)]
    found = {
        (op, dtype, tuple(sorted(same_code(tile(op, MEASURED, formula, m, n, k)).items())))
        for op in ("w8a16_int8", "w8a16_fp8")
        for m, n, k, dtype in [*cases, (16, 4096, 4096, "fp16"), (256, 4096, 4096, "fp16")]
    }
    for op, dtype, items in sorted(found):
        if "WIDEN" not in dict(items):
            yield _variant(op, dtype, dict(items))


def _variant(op: str, dtype: str, entry: dict[str, Any]) -> Variant:
    types = dict.fromkeys(("M", "N", "K"), "i32") | {"w": "*i32", "scale": "*fp32", "bias": "*fp32"}
    types["x"] = f"tensordesc<{dtype}{[entry['BM'], min(entry['BK'], 128)]}>"
    types["out"] = "*fp32" if entry["SPLITS"] > 1 else f"*{dtype}"
    wide = tl.bfloat16 if dtype == "bf16" else tl.float16
    options = launch_options(entry, None, True, FP8=op == "w8a16_fp8", WIDE=wide, ASM=True)
    constants = {name: value for name, value in options.items() if name in product.arg_names}
    signature = {name: types[name] for name in product.arg_names if name not in constants}
    launch = {name: value for name, value in options.items() if name not in constants}
    label = " ".join([op, dtype, *(f"{name}={value}" for name, value in entry.items())])
    return Variant(label, product, signature, constants, launch, ("N", "K"), wants_tensor_cores=True)


@triton.jit
def widen(words, FP8: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    """The four codes of each word as numbers of type WIDE, in the order (h, p) = 00, 01, 10, 11.

    int8 to bfloat16: 128 + (low seven bits) minus 128 + (sign bit), both made by setting the exponent.
    int8 to float16: 1024 + (code + 128) minus 1152, likewise. e4m3 to bfloat16: the bits moved to where
    bfloat16 has them, times 2^120 for the other bias of the exponent, which holds for subnormal codes too.
    e4m3 to float16: moved by one bit, which leaves the code times 2^-8; the caller has that in the scale.
    """
    if not ASM:
        low, second, third, high = (words << 24) >> 24, (words << 16) >> 24, (words << 8) >> 24, words >> 24
        a00, a01 = _plain(low, FP8, WIDE), _plain(third, FP8, WIDE)
        a10, a11 = _plain(second, FP8, WIDE), _plain(high, FP8, WIDE)
    elif WIDE.is_bf16():
        a00, a01, a10, a11 = _to_bfloat16(words, E4M3_TO_BFLOAT16 if FP8 else INT8_TO_BFLOAT16)
    else:
        a00, a01, a10, a11 = _to_float16(words, E4M3_TO_FLOAT16 if FP8 else INT8_TO_FLOAT16)
    return a00, a01, a10, a11


INT8_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 h,a,b,c,d;
    shr.u32 h,$4,8;
    lop3.b32 a,$4,0x007f007f,0x43004300,0xea; lop3.b32 b,$4,0x00800080,0x43004300,0x6a;
    lop3.b32 c,h,0x007f007f,0x43004300,0xea; lop3.b32 d,h,0x00800080,0x43004300,0x6a;
    sub.rn.bf16x2 a,a,b; sub.rn.bf16x2 c,c,d;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},c; }""")
INT8_TO_FLOAT16 = tl.constexpr("""{ .reg .b32 u,h,a,c,m;
    xor.b32 u,$4,0x80808080; shr.u32 h,u,8; mov.b32 m,0x64806480;
    lop3.b32 a,u,0x00ff00ff,0x64006400,0xea; lop3.b32 c,h,0x00ff00ff,0x64006400,0xea;
    sub.rn.f16x2 a,a,m; sub.rn.f16x2 c,c,m;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},c; }""")
E4M3_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 h,a,c,m;
    shl.b32 h,$4,8; mov.b32 m,0x7b807b80;
    and.b32 a,h,0x7f007f00; shr.u32 a,a,4; lop3.b32 a,h,0x80008000,a,0xea; mul.rn.bf16x2 a,a,m;
    and.b32 c,$4,0x7f007f00; shr.u32 c,c,4; lop3.b32 c,$4,0x80008000,c,0xea; mul.rn.bf16x2 c,c,m;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},c; }""")
E4M3_TO_FLOAT16 = tl.constexpr("""{ .reg .b32 h,a,c;
    shl.b32 h,$4,8;
    and.b32 a,h,0x7f007f00; shr.u32 a,a,1; lop3.b32 a,h,0x80008000,a,0xea;
    and.b32 c,$4,0x7f007f00; shr.u32 c,c,1; lop3.b32 c,$4,0x80008000,c,0xea;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},c; }""")


@triton.jit
def _to_bfloat16(words, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _to_float16(words, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _plain(code, FP8: tl.constexpr, WIDE: tl.constexpr):
    if FP8:
        return code.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(WIDE)
    return code.to(WIDE)


@triton.jit
def widened_tile(words, FP8: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Packed words [BN, BK / 4] -> their codes as WIDE [BN, BK], columns in their own order."""
    ROWS: tl.constexpr = words.shape[0]
    COLS: tl.constexpr = words.shape[1] * 4
    a00, a01, a10, a11 = widen(words, FP8, WIDE, ASM)
    tile = tl.join(tl.join(a00, a10), tl.join(a01, a11))  # [BN, BK / 4, h, p]
    tile = tl.reshape(tile, (ROWS, COLS // 64, 4, 4, 2, 2))  # BN, 64s, t, s, h, p
    return tl.reshape(tl.permute(tile, (0, 1, 3, 4, 2, 5)), (ROWS, COLS))


@triton.jit
def multiplications_done():
    """Waits until the matrix instructions that are under way have read their registers.

    Triton (3.6 and 3.9) lets them run on while the next step's operand is written to the very registers that
    they still read, which gave wrong sums from 128 tokens on, where they run longest.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def product(x, w, scale, bias, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            SPLITS: tl.constexpr, BIAS: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
            ASM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """x [M, K]: a descriptor in blocks of [BM, min(BK, 128)]; w: fragments, int32 [ceil(K / 128), N, 32].

    Grid (tiles, SPLITS); BK is 64, 128 or 256. SPLITS > 1: out is float32 [SPLITS, M, N] and gets no bias.
    """
    FACTOR: tl.constexpr = 256.0 if FP8 and ASM and WIDE.is_fp16() else 1.0
    LOAD: tl.constexpr = min(BK, 128)
    num_m = tl.cdiv(M, BM)
    steps = tl.cdiv(K, BK)
    row = tl.program_id(0) % num_m * BM
    col = tl.program_id(0) // num_m * BN
    if EARLY:
        if EARLY == 1:
            cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    words_of_row = w + tl.minimum(cols, N - 1)[:, None] * 32 + tl.arange(0, LOAD // 4)[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(tl.program_id(1) * steps // SPLITS, (tl.program_id(1) + 1) * steps // SPLITS):
        for i in tl.static_range(BK // LOAD):
            part = step * (BK // LOAD) + i
            a = x.load([row, part * LOAD])
            panel = tl.cast(part // (128 // LOAD), tl.int64) * (N * 32)
            words = tl.load(words_of_row + panel + part % (128 // LOAD) * (LOAD // 4))
            if ASM:
                multiplications_done()
            acc = tl.dot(widened_tile(words, FP8, WIDE, ASM), a.T, acc)
    if EARLY == 2:
        cuda.gdc_launch_dependents()
    y = tl.trans(acc) * (tl.load(scale + cols, mask=cols < N, other=0.0).to(tl.float32) * FACTOR)[None, :]
    if BIAS and SPLITS == 1:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    where = out + (tl.program_id(1).to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def widen_rows(w, scale, out, N, K, BN: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """out [N, K] = codes times scale, rounded once to out's type; a grid of (K / 128, N / BN)."""
    FACTOR: tl.constexpr = 256.0 if FP8 and ASM and WIDE.is_fp16() else 1.0
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    cols = tl.program_id(0) * 128 + tl.arange(0, 128)
    inside = tl.minimum(rows, N - 1)
    panel = w + tl.program_id(0).to(tl.int64) * N * 32
    words = tl.load(panel + inside[:, None] * 32 + tl.arange(0, 32)[None, :])
    factor = tl.load(scale + inside).to(tl.float32) * FACTOR
    y = widened_tile(words, FP8, WIDE, ASM).to(tl.float32) * factor[:, None]
    where = out + rows.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (cols < K)[None, :])
