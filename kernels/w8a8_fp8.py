"""Product of float8 e4m3fn weights per channel and float8 activations: the meaning.

    y[t, n] = sx[t] * sw[n] * sum_k qx[t, k] * qw[n, k] + bias[n]

The scale of the activations is each token's own, or one that calibration fixed for all (static).
"""

import torch
from torch import Tensor

from qinfer.kernels.panels import rows_of
from qinfer.kernels.quantize_per_token import FP8_MAX, fp8_per_token
from qinfer.kernels.sums import rounded


def w8a8_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight float8 [N, K] (or its panels), weight_scale float32 [N] -> [T, N] in x's dtype."""
    codes, scale = fp8_per_token(x)
    return w8a8_fp8_codes(codes, scale, weight, weight_scale, x.dtype, bias)


def w8a8_fp8_static(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As `w8a8_fp8` with one scale, input_scale float32 [1], for all of x; what exceeds it saturates."""
    codes = fp8_static(x, input_scale)
    return w8a8_fp8_codes(codes, input_scale, weight, weight_scale, x.dtype, bias)


def w8a8_fp8_codes(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of activations that are quantized already: codes [T, K], scale [T, 1] or [1] -> `dtype`."""
    sums = codes.float() @ rows_of(weight, codes.shape[1]).float().T
    y = sums * weight_scale * scale
    return rounded(y, bias, dtype)


def w8a8_fp8_parts(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`w8a8_fp8_codes` for an op that adds up partial sums; there is one here, and a twin may leave more."""
    return w8a8_fp8_codes(codes, scale, weight, weight_scale, dtype)


def fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Codes float8_e4m3fn [T, K] of x [T, K] on the grid of scale float32 [1]; NaN stays NaN."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
