"""Product of `w8a16_fp8` on the CPU, which has no float8 arithmetic: codes widened once, at load.

bfloat16 and float32 hold every float8 e4m3 value exactly, so only the sum is rounded, and once more with its
scale. The price is memory: two bytes a weight with bfloat16 activations, else four.
"""

from torch import Tensor

from qinfer.kernels.linear_cpu import linear


def w8a16_fp8_cpu(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight [N, K] widened to bfloat16 or float32, weight_scale float32 [N] -> [T, N] like x."""
    return linear(x.type_as(weight), weight).float().mul_(weight_scale).type_as(x)
