"""Product of float8 codes with a scale for every 128x128 block of the weight: the meaning.

    y[t, n] = sum_g sx[t, g] * sw[n / 128, g] * sum_{k in g} qx[t, k] * qw[n, k] + bias[n]

The format of DeepSeek-V3's and Qwen3's float8 checkpoints: a token has a scale for every 128 of its columns
too, found while running. The last block of rows or columns may be narrower.
"""

import torch
from torch import Tensor

from qinfer.kernels.panels import rows_of
from qinfer.kernels.quantize_per_token import FP8_MAX, SMALLEST_SCALE
from qinfer.kernels.sums import rounded

GROUP = 128


def w8a8_fp8_block(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight float8 [N, K] (or its panels), weight_scale [ceil(N/128), ceil(K/128)] -> [T, N]."""
    codes, scale = fp8_per_group(x)
    return w8a8_fp8_block_codes(codes, scale, weight, weight_scale, x.dtype, bias)


def w8a8_fp8_block_codes(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of activations that are quantized already: codes [T, K], scale [T, ceil(K/128)]."""
    weight = rows_of(weight, codes.shape[1]).float()
    weight = weight * _spread(_spread(weight_scale, weight.shape[1]).T, weight.shape[0]).T
    y = codes.float() * _spread(scale, codes.shape[1]) @ weight.T
    return rounded(y, bias, dtype)


def fp8_per_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float8_e4m3fn [T, K] and scale float32 [T, ceil(K/128)] = absmax of 128 / 448."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(x.shape[0], -1, GROUP)
    limit = torch.full((), FP8_MAX, device=x.device)  # a plain number's reciprocal is an ulp off on a GPU
    scale = (groups.abs().amax(-1) / limit).clamp_min(SMALLEST_SCALE)
    codes = (x.float() / _spread(scale, x.shape[1])).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def _spread(scale: Tensor, length: int) -> Tensor:
    """scale [R, G] -> [R, length]: each column stands for 128."""
    return scale.repeat_interleave(GROUP, 1)[:, :length]
