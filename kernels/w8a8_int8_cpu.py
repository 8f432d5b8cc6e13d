"""Integer product of `w8a8_int8` on the CPU: torch's int8 weight op for one or two rows, `_int_mm` for more.

Both read the weight as it lies in the file, so a weight takes one byte and nothing is prepared. oneDNN's
quantized linear with prepacked weights was tried: measured in the steps of a model of 30 layers (two cores of
a Xeon with AMX) it took 1.2 to 1.5 times as long at 1 to 16 rows, because each call spends 60 us and more on
finding its primitive again, and was even at 512.

With one row, time goes to calling ops, not to arithmetic: a call with a tensor operand costs 1.7 us, the same
call with a Python number or mixed dtypes 3.4 us, `.to(dtype)` 3 us where `.char()` costs 1.8. Hence:
 * constants are tensors of one element;
 * for the integer product, rounding is one addition: float32 numbers from 2^23 to 2^24 are the integers, so
   x + 1.5 * 2^23 is rounded half to even, and the low byte of its bits is the code in two's complement.

torch's int8 weight op wants bfloat16 rows. Codes are exact in it and its sums are float32, but it rounds the
sum times `weight_scale`, both in bfloat16, before the token's scale comes in: three roundings, not one.
"""

import torch
from torch import Tensor

from qinfer.kernels.quantize_per_token import INT8_MAX, SMALLEST_SCALE

MAX_ROWS_OF_INT8_OP = 2
_INT8_MAX = torch.tensor([INT8_MAX], device="cpu")
_ROUND = torch.tensor([1.5 * 2**23], device="cpu")


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> x / scale [T, K], whose integers are the codes of `int8_per_token`, and scale [T, 1]."""
    x = x.float()
    scale = x.abs().amax(-1, True).div_(_INT8_MAX).clamp_min_(SMALLEST_SCALE)
    return x.div(scale), scale


def w8a8_int8_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale [N] -> [T, N] in x's dtype."""
    codes, scale = scaled(x)
    if x.dtype is torch.bfloat16 and x.shape[0] <= MAX_ROWS_OF_INT8_OP:
        rows = codes.round_().bfloat16()
        return torch._weight_int8pack_mm(rows, weight, weight_scale.bfloat16()).mul_(scale)
    if x.shape[1] == 1:  # torch 2.13 takes [N, 1] transposed for [1, N] and reads beyond it
        sums = codes.round_() * weight.float().t()
    else:
        sums = torch._int_mm(codes.add_(_ROUND).view(torch.int32).char(), weight.t()).float()
    return sums.mul_(weight_scale.float()).mul_(scale).type_as(x)


def gives_exact_integers() -> bool:
    """Whether this processor's instructions sum s8 x s8 products without saturating at 16 bits."""
    weight = torch.full((32, 256), -128, dtype=torch.int8)
    weight[::2] = 127
    codes = torch.full((17, 256), -127, dtype=torch.int8)
    return torch.equal(torch._int_mm(codes, weight.t()).double(), codes.double() @ weight.double().T)
