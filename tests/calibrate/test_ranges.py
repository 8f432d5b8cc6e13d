"""Range search: the second-moment error is the real one, and no group gets worse."""

import pytest
import torch

from qinfer.calibrate.gram import second_moments
from qinfer.calibrate.grid import Grid
from qinfer.calibrate.ranges import (
    full_ranges,
    input_weighted_error,
    output_error,
    search_ranges,
    weight_error,
)
from qinfer.quant import W4A16

GROUP = 32


def _affine(weight, ranges, levels=15):
    """An independent asymmetric grid of 16 levels in float64."""
    low, high = (r.double()[..., None] for r in ranges)
    groups = weight.double().view(weight.shape[0], -1, GROUP)
    step = ((high - low) / levels).clamp(min=1e-12)
    zero = (-low / step).round().clamp(0, levels)
    back = ((groups / step).round() + zero).clamp(0, levels) - zero
    return (back * step).view_as(weight).float()


def _case(seed=0, rows=48, width=96, tokens=400):
    torch.manual_seed(seed)
    weight = torch.randn(rows, width) ** 3  # heavy tails: clipping pays
    x = torch.randn(tokens, width) * torch.rand(width)
    return weight, x


def _search(weight, x, *, symmetric, error_of=None):
    scheme = W4A16(GROUP, symmetric)
    error_of = error_of or output_error(second_moments([x], GROUP))
    return search_ranges(
        weight, GROUP, lambda r: Grid.of(scheme, r, torch.float32), error_of, symmetric=symmetric
    )


def test_full_ranges_include_zero():
    weight = torch.tensor([[1.0, 2.0, -3.0, -1.0]])
    low, high = full_ranges(weight, 2, symmetric=False)
    assert (low.tolist(), high.tolist()) == ([[0.0, -3.0]], [[2.0, 0.0]])
    low, high = full_ranges(weight, 2, symmetric=True)
    assert (low.tolist(), high.tolist()) == ([[-2.0, -3.0]], [[2.0, 3.0]])


def test_reported_share_is_the_error_of_the_outputs_group_by_group():
    weight, x = _case()
    ranges, share = _search(weight, x, symmetric=False)

    def error(r):
        delta = (_affine(weight, r) - weight).view(48, -1, GROUP)
        return torch.einsum("tgk,ngk->tng", x.view(-1, 3, GROUP), delta).double().pow(2).sum(0)

    before, after = error(full_ranges(weight, GROUP, symmetric=False)), error(ranges)
    assert (after <= before * (1 + 1e-5)).all()
    assert abs(share - float(after.sum() / before.sum())) < 1e-4
    assert share < 0.9


def test_search_with_dead_inputs_keeps_the_full_range():
    weight, x = _case()
    full = full_ranges(weight, GROUP, symmetric=False)
    ranges, share = _search(weight, x * 0, symmetric=False)
    assert share == 1.0
    assert all(torch.equal(a, b) for a, b in zip(ranges, full, strict=True))


def test_symmetric_search_returns_symmetric_ranges():
    weight, x = _case()
    (low, high), share = _search(weight, x, symmetric=True)
    assert torch.equal(low, -high)
    assert share <= 1.0


def test_rows_are_searched_alike_however_many_there_are():
    """1500 rows are more than one portion."""
    weight, x = _case(rows=1500)
    whole, _ = _search(weight, x, symmetric=False)
    alone, _ = _search(weight[1490:], x, symmetric=False)
    assert all(torch.equal(a[1490:], b) for a, b in zip(whole, alone, strict=True))


def test_mse_and_imatrix_lower_the_error_that_they_judge_by():
    weight, x = _case()
    full = full_ranges(weight, GROUP, symmetric=False)
    squares = x.square().mean(0)

    def errors(ranges):
        delta = (_affine(weight, ranges) - weight).double()
        return delta.abs().pow(2.4).sum().item(), (delta.square() * squares).sum().item()

    by_weight, share = _search(weight, x, symmetric=False, error_of=weight_error)
    assert errors(by_weight)[0] == pytest.approx(share * errors(full)[0], rel=1e-3)
    assert share < 0.98
    by_input, share = _search(
        weight, x, symmetric=False, error_of=input_weighted_error(squares.view(-1, GROUP))
    )
    assert errors(by_input)[1] == pytest.approx(share * errors(full)[1], rel=1e-3)
    assert errors(by_input)[1] < errors(by_weight)[1]
