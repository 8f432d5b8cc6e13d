"""Products of float8 codes with block scales on a GPU: around every tile's edge, and each kind of kernel."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import w8a8_fp8_block as meaning
from qinfer.kernels import w8a8_fp8_block_triton as twin
from qinfer.kernels.panels import to_panels
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257, 512, 1000, 4097)
# no multiples of a tile's 128 or 256 rows, of a block, of a split
SHAPES = ((896, 896), (4864, 272), (1152, 8960), (136, 11008), (4096, 4096))
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What is allocated next holds NaN where nothing is written."""
    torch.full((1 << 27,), math.nan, device="cuda")


def fp8_codes(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def scales(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda") * 0.01 + 1e-4


def wide(scale: Tensor, length: int) -> Tensor:
    """scale [R, G], each of which stands for 128 columns -> [R, length]."""
    return scale.repeat_interleave(128, 1)[:, :length]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_float8_sums_with_block_scales(n, k):
    weight, bias = fp8_codes(n, k), torch.randn(n, device="cuda")
    weight_scale = scales(-(-n // 128), -(-k // 128))
    panels = to_panels(weight)
    for m in TOKENS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        codes, scale = twin.fp8_per_group(x)
        exact_weight = weight.double() * wide(wide(weight_scale, k).T, n).T
        exact = (codes.double() * wide(scale, k)) @ exact_weight.T + bias
        for dtype, bound in ((torch.bfloat16, 3e-3), (torch.float32, 1e-3)):
            y = twin.w8a8_fp8_block_codes(codes, scale, panels, weight_scale, dtype, bias)
            assert error_ratio(y, exact) < bound, m
        plain = twin.w8a8_fp8_block_codes(codes, scale.contiguous(), panels, weight_scale, dtype, bias)
        assert torch.equal(y, plain)


@pytest.mark.parametrize("early", [0, 1])
def test_block_scales_by_warps_for_any_number_of_tokens(early):
    shape = {"BM": 128, "BN": 256, "SPLITS": 1, "num_warps": 4}
    entry = {**shape, "STAGES": 4, "GROUP": 2, "EARLY": early}
    for n, k in ((136, 272), (896, 128), (2048, 2064)):
        weight, weight_scale, bias = fp8_codes(n, k), scales(-(-n // 128), -(-k // 128)), scales(n)
        exact_weight = weight.double() * wide(wide(weight_scale, k).T, n).T
        for m in (1, 130, 600):
            codes, scale = twin.fp8_per_group(torch.randn(m, k, device="cuda"))
            exact = (codes.double() * wide(scale, k)) @ exact_weight.T
            for dtype in DTYPES:
                for addend in (None, bias):
                    given = (codes, scale, to_panels(weight), weight_scale, dtype, addend)
                    y = twin.multiply.run(entry, *given)
                    assert error_ratio(y, exact if addend is None else exact + bias) < 3e-3, (n, k, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 64, 300])
def test_from_activations_as_the_meaning(m, dtype):
    n, k = 896, 1152
    x = torch.randn(m, k, device="cuda").to(dtype) * 3
    weight, weight_scale = fp8_codes(n, k), scales(n // 128, k // 128)
    panels = to_panels(weight)
    expected = meaning.w8a8_fp8_block(x, weight, weight_scale)
    assert error_ratio(twin.w8a8_fp8_block(x, panels, weight_scale), expected) < 1e-2
    assert torch.equal(meaning.w8a8_fp8_block(x, panels, weight_scale), expected)


def test_codes_with_a_scale_per_group():
    x = torch.randn(37, 400, device="cuda", dtype=torch.bfloat16) * 40
    x[3] = 0
    codes, scale = twin.fp8_per_group(x)
    expected, expected_scale = meaning.fp8_per_group(x)
    assert torch.equal(scale, expected_scale)
    assert scale.T.is_contiguous()
    assert error_ratio(codes.float(), expected.float()) < 1e-2  # the division rounds at a few ties
    assert (codes[3].float() == 0).all()
