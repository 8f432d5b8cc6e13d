# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""From words in fragment order (see w4a16.py) to 16-bit floats, eight codes a word, in registers.

A mask picks two codes of a word and or-s them into the low mantissa bits of a power of two, which gives
MAGIC + code exactly; subtracting MAGIC + zero, which `scale_zero` holds, leaves code - zero exactly too.
That is about one instruction a weight. A conversion would be one as well, but of a unit of a quarter's speed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qinfer.kernels.w4a16 import INPUTS, ROWS

TILE_WORDS = tl.constexpr(ROWS * INPUTS // 8)

_SHIFTS_AND_MASKS = """{ .reg .b32 a,b,c,d,s1,s2,s3;
    shr.u32 s1,$8,4; shr.u32 s2,$8,8; shr.u32 s3,$8,12;
    lop3.b32 a,$8,0x000f000f,MAGIC,0xea; lop3.b32 b,s1,0x000f000f,MAGIC,0xea;
    lop3.b32 c,s2,0x000f000f,MAGIC,0xea; lop3.b32 d,s3,0x000f000f,MAGIC,0xea;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},b; mov.b32 {$4,$5},c; mov.b32 {$6,$7},d; }"""
_WAIT_FIRST = _SHIFTS_AND_MASKS.replace("shr.u32", "wgmma.wait_group.sync.aligned 0; shr.u32", 1)
BFLOAT16_CODES = tl.constexpr(_SHIFTS_AND_MASKS.replace("MAGIC", "0x43004300"))
FLOAT16_CODES = tl.constexpr(_SHIFTS_AND_MASKS.replace("MAGIC", "0x64006400"))
BFLOAT16_CODES_WAIT = tl.constexpr(_WAIT_FIRST.replace("MAGIC", "0x43004300"))
FLOAT16_CODES_WAIT = tl.constexpr(_WAIT_FIRST.replace("MAGIC", "0x64006400"))


@triton.jit
def _bfloat16_codes(w, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,=h,=h,=h,=h,=h,=h,r", [w], is_pure=True, pack=1,
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
               tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
    )  # fmt: skip


@triton.jit
def _float16_codes(w, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,=h,=h,=h,=h,=h,=h,r", [w], is_pure=True, pack=1,
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
               tl.float16, tl.float16, tl.float16, tl.float16),
    )  # fmt: skip


@triton.jit
def _codes(w, WAIT: tl.constexpr, SCALE: tl.constexpr, COMPUTE: tl.constexpr, ASM: tl.constexpr):
    """Words int32 [R, 16] -> MAGIC + codes, COMPUTE [R, t, block, h, s, p] (nibble (2 s + h) + 4 p)."""
    if not ASM:  # the interpreter has none, and computes bfloat16 in float32
        magic = 128.0 if tl.bfloat16 == SCALE else 1024.0
        o0, o1 = ((w & 15) + magic).to(COMPUTE), (((w >> 16) & 15) + magic).to(COMPUTE)
        o2, o3 = (((w >> 4) & 15) + magic).to(COMPUTE), (((w >> 20) & 15) + magic).to(COMPUTE)
        o4, o5 = (((w >> 8) & 15) + magic).to(COMPUTE), (((w >> 24) & 15) + magic).to(COMPUTE)
        o6, o7 = (((w >> 12) & 15) + magic).to(COMPUTE), (((w >> 28) & 15) + magic).to(COMPUTE)
    elif tl.bfloat16 == SCALE:
        o0, o1, o2, o3, o4, o5, o6, o7 = _bfloat16_codes(w, BFLOAT16_CODES_WAIT if WAIT else BFLOAT16_CODES)
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = _float16_codes(w, FLOAT16_CODES_WAIT if WAIT else FLOAT16_CODES)
    low = tl.join(tl.join(o0, o2), tl.join(o4, o6))
    high = tl.join(tl.join(o1, o3), tl.join(o5, o7))
    return tl.reshape(tl.join(low, high), (w.shape[0], 4, 4, 2, 2, 2))


@triton.jit
def group_scale(both, SCALE: tl.constexpr):
    """The scales of `scale_zero`'s words, float32."""
    if tl.bfloat16 == SCALE:
        return (both << 16).to(tl.float32, bitcast=True)
    return both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _magic_zero(both, SCALE: tl.constexpr, COMPUTE: tl.constexpr):
    if tl.bfloat16 == COMPUTE:
        return (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if tl.bfloat16 == SCALE:
        return ((both >> 16) << 16).to(tl.float32, bitcast=True).to(COMPUTE)
    return (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(COMPUTE)


@triton.jit
def weight_tile(w, both, SCALED: tl.constexpr, PAIRS_FIRST: tl.constexpr, WAIT: tl.constexpr,
                SCALE: tl.constexpr, COMPUTE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Words [R, 16] and `scale_zero` words, [R] or [R, groups of the tile] -> code - zero, COMPUTE [R, 128].

    SCALED: times the scale, rounded to COMPUTE. The inputs are in their order, or for PAIRS_FIRST in that of
    `pairs_first`. WAIT: only after all matrix instructions of this thread that were begun. Where a product's
    sum is carried through a loop, Triton lets them run on into the next iteration (triton-lang/triton#9433),
    which must not overwrite the registers that they still read.
    """
    ROWS: tl.constexpr = w.shape[0]
    codes = _codes(w, WAIT, SCALE, COMPUTE, ASM)
    zero = _magic_zero(both, SCALE, COMPUTE)
    scale = group_scale(both, SCALE).to(COMPUTE)
    if len(both.shape) == 2:  # groups of 32 or 64: a value for each block of 32
        zero, scale = _per_block(zero), _per_block(scale)
        codes -= zero
        if SCALED:
            codes *= scale
    if PAIRS_FIRST:
        tile = tl.reshape(tl.permute(codes, (0, 2, 4, 1, 3, 5)), (ROWS, 128))
    else:
        tile = tl.reshape(tl.permute(codes, (0, 2, 4, 3, 1, 5)), (ROWS, 128))
    if len(both.shape) == 1:
        tile -= zero[:, None]
        if SCALED:
            tile *= scale[:, None]
    return tile


@triton.jit
def _per_block(x):
    """[R, G] with G = 2 or 4 -> [R, 1, 4 blocks, 1, 1, 1]."""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1]
    blocks = tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, 4 // GROUPS)), (ROWS, 4))
    return tl.reshape(blocks, (ROWS, 1, 4, 1, 1, 1))


@triton.jit
def pairs_first(x):
    """x [128, M], of each 16 rows 8 h + 2 t + p -> 4 t + 2 h + p.

    Triton sees values that were joined and gives a thread four neighbours of a row instead of two (kWidth 4).
    In this order those are the two pairs that it has.
    """
    COLS: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (8, 2, 4, 2, COLS)), (0, 2, 1, 3, 4)), (128, COLS))


@triton.jit
def load_scale_zero(scale_zero, rows, g, stride, GROUP: tl.constexpr):
    """The words of tile g for rows: [R], or [R, 128 / GROUP] where a tile holds several groups."""
    if GROUP < 128:
        groups = g * (128 // GROUP) + tl.arange(0, 128 // GROUP)
        both = tl.load(scale_zero + groups[None, :] * stride + rows[:, None])
    else:
        both = tl.load(scale_zero + (g // (GROUP // 128)) * stride + rows)
    return both


@triton.jit
def dequantize_kernel(words, scale_zero, out, N, K, tiles, scale_stride, GROUP: tl.constexpr,
                      SCALE: tl.constexpr, COMPUTE: tl.constexpr, ASM: tl.constexpr,
                      ROWS: tl.constexpr):  # fmt: skip
    """Program (ROWS rows, tile): 128 inputs of out [N, K]."""
    pid = tl.program_id(0)
    row, g = pid // tiles * ROWS, pid % tiles
    i = tl.arange(0, ROWS)
    at = words + (row // 64).to(tl.int64) * tiles * TILE_WORDS + g * TILE_WORDS
    w = tl.load(at + (i // 64 * tiles * TILE_WORDS + i % 64 * 16)[:, None] + tl.arange(0, 16)[None, :])
    both = load_scale_zero(scale_zero, row + i, g, scale_stride, GROUP)
    tile = weight_tile(w, both, True, False, False, SCALE, COMPUTE, ASM)
    inputs = g * 128 + tl.arange(0, 128)
    where = out + (row + i).to(tl.int64)[:, None] * K + inputs[None, :]
    tl.store(where, tile.to(out.dtype.element_ty), mask=(row + i < N)[:, None] & (inputs < K)[None, :])
