# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""From words in fragment order to 16-bit floats, for the kernels with one task per warp (Gluon).

What w4a16_unpack_triton.py does for plain Triton, where layouts find themselves. Here they are written down:
a thread has the words whose codes it will multiply, so that nothing moves between threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qinfer.kernels.warps_triton import seen_as

# of [64, 16], 64 rows of 128 inputs: a thread has the four words of two rows
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# A mask puts two codes of a word into the low bits of a power of two; then come the zero and, perhaps, scale.
_CODES = """{ .reg .b32 a,b,c,d,s1,s2,s3;
    shr.u32 s1,$8,4; shr.u32 s2,$8,8; shr.u32 s3,$8,12;
    lop3.b32 a,$8,0x000f000f,MAGIC,0xea; lop3.b32 b,s1,0x000f000f,MAGIC,0xea;
    lop3.b32 c,s2,0x000f000f,MAGIC,0xea; lop3.b32 d,s3,0x000f000f,MAGIC,0xea;
    sub.rn.TYPE a,a,$9; sub.rn.TYPE b,b,$9; sub.rn.TYPE c,c,$9; sub.rn.TYPE d,d,$9;
    mul.rn.TYPE a,a,$10; mul.rn.TYPE b,b,$10; mul.rn.TYPE c,c,$10; mul.rn.TYPE d,d,$10;
    mov.b32 {$0,$1},a; mov.b32 {$2,$3},b; mov.b32 {$4,$5},c; mov.b32 {$6,$7},d; }"""
_UNSCALED = "\n".join(line for line in _CODES.splitlines() if "mul.rn" not in line)
BFLOAT16 = gl.constexpr(_CODES.replace("MAGIC", "0x43004300").replace("TYPE", "bf16x2"))
FLOAT16 = gl.constexpr(_CODES.replace("MAGIC", "0x64006400").replace("TYPE", "f16x2"))
BFLOAT16_UNSCALED = gl.constexpr(_UNSCALED.replace("MAGIC", "0x43004300").replace("TYPE", "bf16x2"))
FLOAT16_UNSCALED = gl.constexpr(_UNSCALED.replace("MAGIC", "0x64006400").replace("TYPE", "f16x2"))


@gluon.jit
def words_of(block):
    """A buffer of 4 KiB, as it was copied -> its words [64, 16]."""
    return seen_as(block, gl.int32, [64, 16], _LINES).load(WORDS)


@gluon.jit
def scales_of(line, ROWS: gl.constexpr, PART: gl.constexpr):
    """A buffer of ROWS of `scale_zero`, as it was copied -> 64 of them, those of a part."""
    return seen_as(line, gl.int32, [ROWS], _LINE).slice(PART * 64, 64).load(gl.SliceLayout(1, WORDS))


@gluon.jit
def scale_of(both, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of `scale_zero`'s words [64], float32 [64, 1] beside a sum of that layout."""
    if SCALE == gl.bfloat16:  # noqa: SIM300
        scale = (both << 16).to(gl.float32, bitcast=True)
    else:
        scale = both.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return gl.convert_layout(scale, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def pairs(both, LIKE: gl.constexpr):
    """`scale_zero` words [64] -> zero and scale, each twice in an int32, of every word of [64, 16]."""
    zero = both & -65536
    scale = both & 65535
    line = gl.zeros((64, 16), gl.int32, LIKE)
    zero, line = gl.broadcast((zero | ((zero >> 16) & 65535))[:, None], line)
    scale, line = gl.broadcast((scale | (scale << 16))[:, None], line)
    return zero, scale


@gluon.jit
def halves(w):
    """[64, 16] for words -> [64, 8] for those of the first 64 inputs, and of the others."""
    first, last = w.reshape((64, 4, 2, 2)).permute((0, 1, 3, 2)).split()
    return first.reshape((64, 8)), last.reshape((64, 8))


@gluon.jit
def quarter(w, NUMBER: gl.constexpr):
    """[64, 16] for words -> [64, 4] for those of inputs 32 NUMBER and on."""
    even, odd = w.reshape((64, 8, 2)).split()
    some = even if NUMBER % 2 == 0 else odd
    first, last = some.reshape((64, 4, 2)).split()
    return first if NUMBER < 2 else last


@gluon.jit
def floats(w, zero, scale, SCALED: gl.constexpr, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [64, W] and `pairs` of them -> codes minus zeros, [64, 8 W] as the cores want it.

    SCALED: times the scale.
    """
    if SCALE == gl.bfloat16:  # noqa: SIM300
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            BFLOAT16 if SCALED else BFLOAT16_UNSCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [w, zero, scale],
            is_pure=True, pack=1,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                   gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        )  # fmt: skip
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            FLOAT16 if SCALED else FLOAT16_UNSCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [w, zero, scale],
            is_pure=True, pack=1,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16,
                   gl.float16, gl.float16, gl.float16, gl.float16),
        )  # fmt: skip
    low = gl.join(gl.join(o0, o2), gl.join(o4, o6))
    high = gl.join(gl.join(o1, o3), gl.join(o5, o7))
    tile = gl.join(low, high).reshape((64, 4, w.shape[1] // 4, 2, 2, 2))  # row, t, block, h, s, p
    tile = tile.permute((0, 2, 4, 3, 1, 5)).reshape((64, w.shape[1] * 8))
    return gl.convert_layout(tile, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)
