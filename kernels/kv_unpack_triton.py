# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Two 8-bit numbers in one 16-bit word: how a GPU reads quantized K and V fast.

`ldmatrix`, the instruction that brings a tile from shared memory into registers in the order that the tensor
cores want, moves 16-bit words; transposed, as V needs it, it moves nothing smaller. So pages of 8-bit numbers
are read as words of two neighbours (d, d + 1) of the head dimension, and only in registers are the words
[.., D / 2] taken apart into the even and the odd dimensions, each a matrix operand of its own:

    q . k   = q_even . k_even + q_odd . k_odd
    p @ v   = (p @ v_even, p @ v_odd), interleaved at the end

fp8 e4m3 becomes float16 by the conversion instruction of sm_89 and later, two numbers at a time; to bfloat16
would take a second conversion per number. int8 never meets the slow integer-to-float unit: its byte is
written into the mantissa of a constant, which is subtracted again. For float16 the constant has room for the
whole byte: 1024, plus 128 for the sign. bfloat16 has room for seven bits, and the sign goes another way.
Elsewhere, in the interpreter and for float32, the words are taken apart by shifts and casts.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of page


@triton.jit
def unpack_pairs(words, KIND: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """int16 words -> (low bytes, high bytes) as numbers of `dtype`."""
    if ASM and KIND == FP8 and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 l, h;
            prmt.b32 t, $2, $2, 0x3120;
            mov.b32 {l, h}, t;
            cvt.rn.f16x2.e4m3x2 $0, l;
            cvt.rn.f16x2.e4m3x2 $1, h; }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and KIND == INT8 and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b, c;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 a, t, 0x64646464, 0x4240;
            prmt.b32 b, t, 0x64646464, 0x4341;
            mov.b32 c, 0x64806480;
            sub.rn.f16x2 $0, a, c;
            sub.rn.f16x2 $1, b, c; }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and KIND == INT8 and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 w, a, b, c, d;
            shr.u32 w, $2, 8;
            lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 b, $2, 0x00800080, 0x43004300, 0x6a;
            lop3.b32 c, w, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 d, w, 0x00800080, 0x43004300, 0x6a;
            sub.rn.bf16x2 $0, a, b;
            sub.rn.bf16x2 $1, c, d; }""",
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif KIND == INT8:
        low = ((words << 8) >> 8).to(tl.float32).to(dtype)
        high = (words >> 8).to(tl.float32).to(dtype)
    else:
        low = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        high = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return low, high
