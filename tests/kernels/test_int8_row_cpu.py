"""One token on the CPU: codes and products are those of the fused ops, in float32 and rounded once."""

import math

import pytest
import torch
from torch import Tensor

from qinfer import ops
from qinfer.kernels import fused_activation, fused_norm, int8_row_cpu, w8a8_int8
from qinfer.kernels.quantize_per_token import int8_per_token
from qinfer.testing import error_ratio


def rows(seed: int = 0) -> Tensor:
    """Rows of many magnitudes, bfloat16 [24, 192]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 192, generator=generator) * torch.logspace(-12, 12, 24).unsqueeze(1)
    return x.bfloat16()


def same_codes(row: int8_row_cpu.Int8Row, codes: Tensor, scale: Tensor) -> None:
    """Equal but where a quotient lies on a tie within rounding; there one step."""
    apart = (row.codes.double() - codes.T.double()).abs()
    assert row.codes.dtype is torch.int8
    assert apart.max() <= 1
    assert apart.sum() <= 4
    assert row.scale == pytest.approx(float(scale), rel=1e-6)


def test_codes_of_a_row_are_those_of_the_op() -> None:
    for x in rows().split(1):
        row = int8_row_cpu.quantize(x)
        codes, scale = int8_per_token(x)
        assert torch.equal(row.codes, codes.T)
        assert row.scale == pytest.approx(float(scale), rel=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_normed_row(offset: float) -> None:
    weight = torch.randn(192, generator=torch.Generator().manual_seed(1)).bfloat16()
    for x in rows().split(1):
        same_codes(
            int8_row_cpu.rms_norm(x, weight.float() + offset, 1e-5),
            *fused_norm.rms_norm_int8(x, weight, 1e-5, offset),
        )


def test_a_gated_row() -> None:
    for x in rows()[8:16].split(1):
        same_codes(int8_row_cpu.silu_mul(x), *fused_activation.silu_mul_int8(x))
        same_codes(int8_row_cpu.gelu_mul(x), *fused_activation.gelu_mul_int8(x))


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 192), (3, 7), (48, 1), (1, 64), (33, 4097)])
def test_the_product_is_the_exact_sum(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    weight_scale = torch.rand(outputs, generator=generator)
    row = int8_row_cpu.quantize(torch.randn(1, inputs, generator=generator))
    exact = row.codes.double().T @ weight.double().T * weight_scale.double() * row.scale
    y = ops.w8a8_int8(row, weight, weight_scale)
    assert isinstance(y, Tensor)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=2**-22, atol=0)


@pytest.mark.parametrize("codes", [torch.int8, None])
def test_the_new_residual_is_the_exact_sum(codes: torch.dtype | None) -> None:
    norm = torch.rand(192, generator=torch.Generator().manual_seed(3)).bfloat16()
    for x, residual in zip(rows()[8:16].float().split(1), rows(4)[8:16].split(1), strict=True):
        exact = residual.double() + 0.5 * x.double()
        before = x.clone(), residual.clone()
        normed, total = ops.add_rms_norm_to(codes, x, residual, norm, 1e-5, multiplier=0.5)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])
        assert total.dtype is torch.float32
        assert error_ratio(total, exact) < 2**-22
        if codes is None:
            assert isinstance(normed, Tensor)
            assert error_ratio(normed, fused_norm.rms_norm(total, norm.float(), 1e-5)) < 1e-6
        else:
            assert isinstance(normed, ops.Int8Row)
            same_codes(normed, *fused_norm.rms_norm_int8(total, norm.float(), 1e-5))


def test_a_row_of_zeros_and_rows_that_are_not_finite() -> None:
    weight = torch.randint(-128, 128, (8, 192), dtype=torch.int8)
    scale = torch.ones(8)
    zeros = torch.zeros(1, 192, dtype=torch.bfloat16)
    assert not ops.w8a8_int8(ops.as_row(torch.int8, zeros), weight, scale).any()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(1, 192, dtype=torch.bfloat16)
        x[0, 7] = bad
        row = ops.as_row(torch.int8, x)
        assert not ops.w8a8_int8(row, weight, scale).isfinite().any()
        assert not w8a8_int8.w8a8_int8(x, weight, scale).isfinite().any()
        normed = ops.rms_norm_to(torch.int8, x, torch.ones(192, dtype=torch.bfloat16), 1e-5)
        assert not ops.scaled(ops.w8a8_int8(normed, weight, scale)).isfinite().any()


def test_one_token_runs_by_rows_and_more_do_not() -> None:
    x, weight = rows()[10:12], torch.ones(192, dtype=torch.bfloat16)
    row = ops.rms_norm_to(torch.int8, x[:1], weight, 1e-5)
    assert isinstance(row, ops.Int8Row)
    row, total = ops.add_rms_norm_to(torch.int8, x[:1], x[1:], weight, 1e-5, multiplier=0.5)
    assert isinstance(row, ops.Int8Row)
    assert torch.equal(total, torch.add(x[1:].float(), x[:1].float(), alpha=0.5))
    assert isinstance(ops.gated_to(torch.int8, ops.silu_mul, x[:1]), ops.Int8Row)
    assert torch.equal(ops.rms_norm_to(torch.int8, x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.rms_norm_to(None, x[:1], weight, 1e-5), ops.rms_norm(x[:1], weight, 1e-5))
