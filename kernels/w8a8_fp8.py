"""Product of float8 e4m3fn weights per channel and float8 activations per token: the meaning.

y[t, n] = sx[t] * sw[n] * sum_k qx[t, k] * qw[n, k]
"""

from torch import Tensor

from qinfer.kernels.quantize_per_token import fp8_per_token


def w8a8_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [T, K], weight float8 [N, K], weight_scale float32 [N] -> [T, N] in x's dtype; float32 sum."""
    codes, scale = fp8_per_token(x)
    return (codes.float() @ weight.float().T * weight_scale * scale).to(x.dtype)
