"""The meanings of 8-bit products against float64, for all kinds of scales, with a bias and without."""

import pytest
import torch
from torch import Tensor

from qinfer.kernels import w8a8_fp8, w8a8_fp8_block, w8a8_int8
from qinfer.kernels.panels import to_panels
from qinfer.testing import error_ratio

E4M3 = torch.float8_e4m3fn
ROUNDED_ONCE = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}
M, N, K = 5, 200, 328  # neither a panel, nor a block of 128, divides N or K


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=[False, True], ids=["rows", "panels"])
def lay(request):
    return to_panels if request.param else lambda weight: weight


@pytest.mark.parametrize("bias", [None, drawn(N) * 30], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", ROUNDED_ONCE)
def test_scales_of_rows(dtype, bias, lay):
    scale, weight_scale = drawn(M, 1).abs(), drawn(N).abs()
    for product, codes, weight in (
        (w8a8_int8.w8a8_int8_codes, (drawn(M, K) * 9).char(), (drawn(N, K) * 9).char()),
        (w8a8_fp8.w8a8_fp8_codes, drawn(M, K).to(E4M3), drawn(N, K).to(E4M3)),
    ):
        exact = codes.double() @ weight.double().T
        added = 0 if bias is None else bias.double()
        for one in (scale, scale[:1].flatten()):
            y = product(codes, one, lay(weight), weight_scale, dtype, bias)
            assert y.dtype is dtype
            assert error_ratio(y, exact * one.double() * weight_scale.double() + added) < ROUNDED_ONCE[dtype]


@pytest.mark.parametrize("bias", [None, drawn(N) * 30], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", ROUNDED_ONCE)
def test_scales_of_blocks(dtype, bias, lay):
    codes, weight = drawn(M, K).to(E4M3), drawn(N, K).to(E4M3)
    scale, weight_scale = drawn(M, 3).abs(), drawn(2, 3).abs()
    exact = torch.zeros(M, N, dtype=torch.float64) if bias is None else bias.double().repeat(M, 1)
    for g in range(3):
        for b in range(2):
            columns, rows = slice(128 * g, 128 * (g + 1)), slice(128 * b, 128 * (b + 1))
            sums = codes[:, columns].double() @ weight[rows, columns].double().T
            exact[:, rows] += sums * scale[:, g : g + 1].double() * weight_scale[b, g].double()
    y = w8a8_fp8_block.w8a8_fp8_block_codes(codes, scale, lay(weight), weight_scale, dtype, bias)
    assert y.dtype is dtype
    assert error_ratio(y, exact) < ROUNDED_ONCE[dtype]


def test_activations_are_quantized_first():
    x, bias, fixed = drawn(M, K), drawn(N) * 30, torch.tensor([0.01])
    integers, floats = (drawn(N, K) * 40).char(), drawn(N, K).to(E4M3)
    weight_scale, blocks = drawn(N).abs(), drawn(2, 3).abs()
    absmax = x.abs().amax(1, keepdim=True)
    groups = torch.stack([part.abs().amax(1) for part in x.split(128, 1)], 1) / 448
    for product, weight, given, step in (
        (w8a8_int8.w8a8_int8, integers, (weight_scale,), absmax / 127),
        (w8a8_fp8.w8a8_fp8, floats, (weight_scale,), absmax / 448),
        (w8a8_fp8.w8a8_fp8_static, floats, (weight_scale, fixed), fixed),
        (w8a8_fp8_block.w8a8_fp8_block, floats, (blocks,), groups.repeat_interleave(128, 1)[:, :K]),
    ):
        codes = x / step
        codes = codes.round() if weight is integers else codes.clamp(-448, 448).to(E4M3).double()
        numbers = weight.double() * (
            weight_scale[:, None]
            if given[0] is weight_scale
            else blocks.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
        )
        exact = (codes.double() * step) @ numbers.T + bias
        assert error_ratio(product(x, weight, *given, bias), exact) < 1e-6
