# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What is stored for numbers of K or V, in registers: shared by the kernels that write pages."""

from __future__ import annotations

import triton
import triton.language as tl

from qinfer.kernels.kv_unpack_triton import FP8, INT8

INT8_MAX = tl.constexpr(127.0)
FP8_MAX = tl.constexpr(448.0)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to an integer, ties to even


@triton.jit
def int8_step(amax):
    """The scale of rows whose largest magnitude is `amax`; never zero."""
    return tl.div_rn(tl.maximum(amax, 1e-12), INT8_MAX)


@triton.jit
def stored(x, inverse, KIND: tl.constexpr, TYPE: tl.constexpr):
    """x float32 as the numbers of a page; `inverse` of the scale broadcasts to x, and is for 8 bits only."""
    if KIND == INT8:
        # the sum's low byte is the integer: no conversion, which is slow
        return (x * inverse + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    elif KIND == FP8:  # past the largest finite number a cast may make NaN
        return tl.clamp(x * inverse, -FP8_MAX, FP8_MAX).to(tl.float8e4nv)
    else:
        return x.to(TYPE)
