"""Range search: the second-moment error is the real one, and no group gets worse."""

import torch

from qinfer.calibrate.ranges import full_ranges, search_ranges, second_moments
from qinfer.testing import error_ratio

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


def test_full_ranges_include_zero():
    weight = torch.tensor([[1.0, 2.0, -3.0, -1.0]])
    low, high = full_ranges(weight, 2, symmetric=False)
    assert (low.tolist(), high.tolist()) == ([[0.0, -3.0]], [[2.0, 0.0]])
    low, high = full_ranges(weight, 2, symmetric=True)
    assert (low.tolist(), high.tolist()) == ([[-2.0, -3.0]], [[2.0, 3.0]])


def test_second_moments_sum_over_batches_of_any_length():
    x = torch.randn(50, 64)
    moments = second_moments([x[:7], x[7:]], GROUP)
    expected = torch.stack([x[:, i : i + GROUP].T @ x[:, i : i + GROUP] for i in (0, GROUP)])
    assert error_ratio(moments, expected) < 1e-6


def test_reported_share_is_the_error_of_the_outputs_group_by_group():
    weight, x = _case()
    ranges, share = search_ranges(weight, second_moments([x], GROUP), _affine, symmetric=False)

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
    ranges, share = search_ranges(weight, second_moments([x * 0], GROUP), _affine, symmetric=False)
    assert share == 1.0
    assert all(torch.equal(a, b) for a, b in zip(ranges, full, strict=True))


def test_symmetric_search_returns_symmetric_ranges():
    weight, x = _case()
    (low, high), share = search_ranges(weight, second_moments([x], GROUP), _affine, symmetric=True)
    assert torch.equal(low, -high)
    assert share <= 1.0
