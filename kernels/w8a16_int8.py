"""Product with int8 weights per channel that are widened as they are read; activations stay as they are.

    y[t, n] = sw[n] * sum_k x[t, k] * qw[n, k]

An int8 code is exact in bfloat16 and in float32, so the scale is applied to the sum and rounds only once.
"""

from torch import Tensor


def w8a16_int8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight int8 [N, K], weight_scale [N] -> [T, N] in x's dtype; the sum is in float32."""
    return (x.float() @ weight.float().T * weight_scale.float()).to(x.dtype)
