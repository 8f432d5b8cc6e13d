"""RMS norm against its formula in float64."""

import pytest
import torch
from torch import Tensor

from qinfer import ops
from qinfer.kernels import norm, norm_cpu
from qinfer.testing import error_ratio

BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # bfloat16: one rounding of the result


def formula(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double())


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (5, 3, 32)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    out = ops.rms_norm(x, weight, 1e-5, offset=offset)
    assert out.dtype == dtype
    assert error_ratio(out, formula(x, weight, 1e-5, offset)) < BOUND[dtype]


def test_small_inputs_meet_eps() -> None:
    x = torch.full((1, 4), 1e-4)
    out = ops.rms_norm(x, torch.ones(4), 1e-6)
    torch.testing.assert_close(out, torch.full((1, 4), 1e-4 / (1e-8 + 1e-6) ** 0.5))


def test_gemma_offset_is_added_before_rounding() -> None:
    """1 + 2^-9 is 1 in bfloat16; added there, the weight would be lost."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 256).bfloat16(), torch.full((256,), 2.0**-9).bfloat16()
    out = ops.rms_norm(x, weight, 0.0, offset=1.0)
    assert torch.equal(out, formula(x, weight, 0.0, 1.0).bfloat16())
    assert not torch.equal(out, formula(x, torch.zeros(256), 0.0, 1.0).bfloat16())


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_add_rms_norm_returns_both_and_changes_nothing(multiplier: float) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5, offset=1.0, multiplier=multiplier)
    expected = residual.double() + multiplier * x.double()
    assert error_ratio(total, expected) < 1e-6
    assert error_ratio(normed, formula(expected, weight, 1e-5, 1.0)) < 1e-6
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("piece", [norm_cpu.PIECE, 500])
@pytest.mark.parametrize("shape", [(1030, 576), (300, 9, 64)], ids=str)
def test_many_rows_by_pieces(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], piece: int, dtype: torch.dtype, offset: float
) -> None:
    """Several pieces, the last short; pieces shorter than a row; nothing of x changes."""
    monkeypatch.setattr(norm_cpu, "PIECE", piece)
    x, weight = 3 * torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    out = norm_cpu.rms_norm(x, weight, 1e-5, offset)
    assert x.numel() >= norm_cpu.FEW
    assert out.dtype == dtype
    assert out.shape == x.shape
    assert error_ratio(out, formula(x, weight, 1e-5, offset)) < BOUND[dtype]
    torch.testing.assert_close(out, norm.rms_norm(x, weight, 1e-5, offset), atol=0, rtol=2 * BOUND[dtype])
    assert torch.equal(x, before)


def test_pieces_do_not_depend_on_their_neighbours() -> None:
    """A row's numbers are the same wherever in a long input it lies, NaN and zero rows beside it."""
    x, weight = torch.randn(1030, 576).bfloat16(), torch.randn(576).bfloat16()
    x[1], x[2] = torch.nan, 0.0
    out = norm_cpu.rms_norm(x, weight, 1e-5)
    turned = norm_cpu.rms_norm(x.roll(7, 0), weight, 1e-5).roll(-7, 0)
    torch.testing.assert_close(out, turned, atol=0, rtol=0, equal_nan=True)
    assert out[1].isnan().all()
    assert (out[2] == 0).all()
    assert not out[3:].isnan().any()


def test_many_rows_let_a_gradient_through() -> None:
    """The mixing of bits by layer differentiates the model: the product's derivative is the formula's."""
    x = torch.randn(300, 576, requires_grad=True)
    weight = torch.randn(576)
    ops.rms_norm(x, weight, 1e-5).sum().backward()
    wide = x.detach().double().requires_grad_()
    formula(wide, weight, 1e-5, 0.0).sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert error_ratio(x.grad, wide.grad) < 1e-5
