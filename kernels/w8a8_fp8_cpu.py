"""Product of `w8a8_fp8` on the CPU, which has no float8 arithmetic: codes widened once, at load.

bfloat16 and float32 hold every float8 e4m3fn value exactly, so the products are those of the meaning and
both scales are applied to the sum. The price is memory: two bytes a weight with bfloat16 activations, else
four (float16 would overflow in sums of codes up to 448 * 448).
"""

import torch
from torch import Tensor
from torch.nn import functional

from qinfer.kernels.quantize_per_token import fp8_per_token


def widen(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn [N, K] -> the same values in bfloat16 where activations are bfloat16, else in float32."""
    return weight.to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)


def w8a8_fp8_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight from `widen`, weight_scale float32 [N] -> [T, N] in x's dtype."""
    codes, scale = fp8_per_token(x)
    return functional.linear(codes.to(weight.dtype), weight).float().mul_(weight_scale).mul_(scale).type_as(x)
