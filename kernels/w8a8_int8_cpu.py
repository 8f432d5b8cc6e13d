"""Integer product of `w8a8_int8` on the CPU, through oneDNN's quantized linear with prepacked weights.

oneDNN wants unsigned activations (its signed ones are a thousand times slower), so a code travels as
code + 128 with a zero point of 128. The integers are those of the meaning; the float32 scales are applied
to them in the same order up to one rounding.

With one row, time goes to calling ops, not to arithmetic: a call with a tensor operand costs 1.7 us, the same
call with a Python number or mixed dtypes 3.4 us, `.to(dtype)` 3 us where `.byte()` costs 1.8. Hence:
 * constants are tensors of one element;
 * rounding and the offset of 128 are one addition: float32 numbers from 2^23 to 2^24 are the integers, so
   x + (1.5 * 2^23 + 128) is rounded half to even, and the low byte of its bits is code + 128;
 * with one row the token's scale goes into oneDNN as a number and the result comes out in x's dtype.
Quantizing 1 / 16 rows of 576 takes 14 / 21 us (written plainly 21 / 47 us). The whole product with a weight
of 1536 x 576 at 4 / 8 / 16 / 64 rows: 80 / 87 / 102 / 240 us, dense bfloat16 141 / 146 / 152 / 252 us (one
core of a Xeon with AMX). `_int_mm` was slower with few rows: 101 us at one row where oneDNN alone takes 50.
"""

import torch
from torch import Tensor

from qinfer.kernels.quantize_per_token import INT8_MAX, SMALLEST_SCALE

_INT8_MAX = torch.tensor([INT8_MAX], device="cpu")
_ROUND_AND_OFFSET = torch.tensor([1.5 * 2**23 + 128], device="cpu")
_NO_ZERO_POINT = torch.zeros(1, dtype=torch.int32, device="cpu")


def pack(weight: Tensor) -> Tensor:
    """int8 [N, K] -> oneDNN's own blocked layout (an opaque tensor of the same number of bytes)."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def unsigned_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (codes of `int8_per_token`) + 128 as uint8 [T, K], and scale float32 [T, 1]."""
    x = x.float()
    scale = x.abs().amax(-1, True).div_(_INT8_MAX).clamp_min_(SMALLEST_SCALE)
    return x.div(scale).add_(_ROUND_AND_OFFSET).view(torch.int32).byte(), scale


def w8a8_int8_cpu(x: Tensor, packed: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `pack`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    codes, scale = unsigned_codes(x)
    if x.shape[0] == 1:
        return _linear(codes, float(scale), packed, weight_scale, x.dtype)
    return _linear(codes, 1.0, packed, weight_scale, torch.float32).mul_(scale).type_as(x)


def gives_exact_integers() -> bool:
    """Whether this processor's instructions sum u8 x s8 products without saturating at 16 bits."""
    weight = torch.full((32, 256), -128, dtype=torch.int8)
    weight[::2] = 127
    codes = torch.full((17, 256), 255, dtype=torch.uint8)
    got = _linear(codes, 1.0, pack(weight), torch.ones(32), torch.float32)
    return torch.equal(got.double(), (codes.double() - 128) @ weight.double().T)


def _linear(codes: Tensor, scale: float, packed: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        codes, scale, 128, packed, weight_scale, _NO_ZERO_POINT, None, 1.0, 0, dtype, "none", [], ""
    )
    return y
