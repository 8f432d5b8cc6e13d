# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""From 8-bit codes in fragments (see panels.py) to 16-bit floats, in registers, two at a time and exactly.

A conversion instruction takes one code, in a unit of a quarter of the others' speed. Instead, masks move the
bits of two codes to where 16-bit floats have them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
def widened_tile(words, FP8: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
                 PAIRS_FIRST: tl.constexpr = False):  # fmt: skip
    """Packed words [BN, BK / 4] -> their codes as WIDE [BN, BK], columns in their own order.

    PAIRS_FIRST: in that of `pairs_first` in w4a16_unpack_triton.py.
    """
    ROWS: tl.constexpr = words.shape[0]
    COLS: tl.constexpr = words.shape[1] * 4
    a00, a01, a10, a11 = widen(words, FP8, WIDE, ASM)
    tile = tl.join(tl.join(a00, a10), tl.join(a01, a11))  # [BN, BK / 4, h, p]
    tile = tl.reshape(tile, (ROWS, COLS // 64, 4, 4, 2, 2))  # BN, 64s, t, s, h, p
    if PAIRS_FIRST:
        tile = tl.permute(tile, (0, 1, 3, 2, 4, 5))
    else:
        tile = tl.permute(tile, (0, 1, 3, 4, 2, 5))
    return tl.reshape(tile, (ROWS, COLS))


@triton.jit
def widen_rows(w, scale, out, N, K, BN: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """out [N, K] = codes times scale, rounded once to out's type; a grid of (K / 128, N / BN)."""
    FACTOR: tl.constexpr = 256.0 if FP8 and ASM and WIDE.is_fp16() else 1.0
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    cols = tl.program_id(0) * 128 + tl.arange(0, 128)
    panel = w + tl.program_id(0).to(tl.int64) * N * 32
    at = panel + rows[:, None] * 32 + tl.arange(0, 32)[None, :]
    words = tl.load(at, mask=(rows < N)[:, None], other=0)
    factor = tl.load(scale + rows, mask=rows < N, other=0.0).to(tl.float32) * FACTOR
    y = widened_tile(words, FP8, WIDE, ASM).to(tl.float32) * factor[:, None]
    where = out + rows.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (cols < K)[None, :])


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
