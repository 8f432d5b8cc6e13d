"""Second moments against float64, in parts and whole, for bfloat16 as exactly as for float32."""

import pytest
import torch

from qinfer.calibrate.gram import Inputs, gram, second_moments
from qinfer.testing import error_ratio

# Of a sum of 700 products in float32 each addition rounds by up to 2^-24: a processor that adds one after the
# other is off by the root of their number times that, one with wide registers by less.
LIMIT = 2 * 700**0.5 * 2**-24


def _inputs(dtype, tokens=700, width=192):
    torch.manual_seed(0)
    x = (torch.randn(tokens, width) * torch.rand(width) * 10).to(dtype)
    return x, x.double().T @ x.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [192, 130, 8])
def test_gram_is_exact_for_what_it_is_given(dtype, width):
    x, expected = _inputs(dtype, width=width)
    got = gram([x[:33], x[33:]])
    assert torch.equal(got, got.T)
    assert error_ratio(got, expected) < LIMIT
    assert torch.linalg.eigvalsh(got.double()).min() > 0


def test_leave_to_multiply_in_bfloat16_ends_with_the_sum():
    before = torch.backends.mkldnn.matmul.fp32_precision
    gram([torch.ones(4, 8, dtype=torch.bfloat16)])
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("gram_first", [True, False])
def test_parts_are_those_of_the_whole(gram_first):
    x, expected = _inputs(torch.float32)
    inputs = Inputs([x[:100], x[100:]])
    if gram_first:
        assert error_ratio(inputs.gram, expected) < LIMIT
    blocks = torch.stack([expected[i : i + 32, i : i + 32] for i in range(0, 192, 32)])
    assert error_ratio(inputs.moments(32), blocks) < LIMIT
    assert error_ratio(inputs.squares, expected.diagonal()) < LIMIT
    assert inputs.absmax == float(x.abs().max())


def test_second_moments_sum_over_batches_of_any_length():
    x = torch.randn(50, 64)
    moments = second_moments([x[:7], x[7:]], 32)
    expected = torch.stack([x[:, i : i + 32].T @ x[:, i : i + 32] for i in (0, 32)])
    assert error_ratio(moments, expected) < LIMIT
