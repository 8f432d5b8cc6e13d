"""The searches' short cut gives what the packed file gives, bit for bit."""

import pytest
import torch

from qinfer.calibrate.ranges import full_ranges
from qinfer.calibrate.roundtrip import as_read_back, judged
from qinfer.quant import W4A16, Dense, W8A8Fp8, W8A8Int8, W8A16Int8

SCHEMES = [W4A16(32, False), W4A16(64, True), W4A16(64, False), W8A16Int8(), W8A8Int8(), W8A8Fp8()]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_to_the_schemes_own_round_trip(scheme, dtype):
    torch.manual_seed(0)
    weight = torch.randn(24, 128) ** 3
    weight[3] = 0.0
    expected = scheme.dequantize(scheme.quantize(weight, dtype=dtype))
    assert torch.equal(as_read_back(scheme, weight, dtype=dtype), expected)


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=lambda s: s.label)
def test_equal_with_narrowed_ranges(scheme):
    torch.manual_seed(0)
    weight = torch.randn(24, 128) ** 3
    low, high = full_ranges(weight, scheme.group_size, symmetric=scheme.symmetric)
    ranges = (low * 0.7, high * (0.7 if scheme.symmetric else 0.9))
    expected = scheme.dequantize(scheme.quantize(weight, ranges, dtype=torch.bfloat16))
    assert torch.equal(as_read_back(scheme, weight, ranges, dtype=torch.bfloat16), expected)


def test_search_does_not_change_its_weight():
    weight = torch.randn(8, 64)
    before = weight.clone()
    as_read_back(W4A16(64, False), weight, dtype=torch.bfloat16)
    assert torch.equal(weight, before)


def test_judged_is_dense_only_where_inputs_are_not_quantized():
    weight = torch.randn(8, 64)
    assert judged(W4A16(64, False), weight, 0.0, dtype=torch.float32)[0] == Dense()
    assert judged(W8A8Int8(), weight, 0.0, dtype=torch.float32)[0] == W8A8Int8()
