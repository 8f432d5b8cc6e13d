"""The searches' short cut gives what the file gives, bit for bit, for every scheme."""

import pytest
import torch

from qinfer.calibrate.grid import Grid
from qinfer.calibrate.ranges import full_ranges
from qinfer.quant import W4A16, W8A8Fp8, W8A8Int8, W8A16Int8

SCHEMES = [W4A16(32, False), W4A16(64, True), W4A16(64, False), W8A16Int8(), W8A8Int8(), W8A8Fp8()]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nearest_is_the_schemes_own_rounding(scheme, dtype):
    torch.manual_seed(0)
    weight = torch.randn(24, 128) ** 3
    weight[3] = 0.0
    size = scheme.group_size if isinstance(scheme, W4A16) else 128
    low, high = full_ranges(weight, size, symmetric=getattr(scheme, "symmetric", True) is not False)
    ranges = (low * 0.7, high * 0.7)
    expected = scheme.dequantize(scheme.quantize(weight, ranges, dtype=dtype))
    grid = Grid.of(scheme, ranges, dtype).map(lambda x: x.unsqueeze(-1))
    before = weight.clone()
    assert torch.equal(grid.nearest(weight.view(24, -1, size)).flatten(1), expected)
    assert torch.equal(weight, before)
    assert torch.equal(scheme.dequantize(scheme.quantize(expected, ranges, dtype=dtype)), expected)
