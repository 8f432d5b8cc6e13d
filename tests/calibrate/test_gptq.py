"""GPTQ against a column-by-column rendering of the paper in float64, and against what breaks it."""

import pytest
import torch

from qinfer.calibrate import gptq as module
from qinfer.calibrate.gptq import DAMP, gptq
from qinfer.calibrate.grid import Grid
from qinfer.calibrate.ranges import full_ranges
from qinfer.quant import W4A16, W8A8Fp8, W8A8Int8
from qinfer.testing import error_ratio

GROUP = 32


def _case(rows=24, width=160, tokens=500):
    torch.manual_seed(0)
    mixing = torch.randn(width, width) / 8 + torch.eye(width)  # inputs that know of each other
    x = torch.randn(tokens, width) * torch.rand(width) @ mixing
    weight = torch.randn(rows, width)
    return weight, x, x.T @ x


def _grid(scheme, weight, width=GROUP):
    return Grid.of(scheme, full_ranges(weight, width, symmetric=False), torch.float32)


def _by_the_paper(weight, gram, grid, order):
    """Equations (2) and (3): the inverse of H without the columns already done, found anew for each."""
    weight, gram = weight.double().clone(), gram.double()
    gram = gram + DAMP * gram.diagonal().mean() * torch.eye(len(gram))
    done = weight.clone()
    left = list(order)
    while left:
        k, inverse = left[0], torch.linalg.inv(gram[left][:, left])
        step = grid.map(lambda x, k=k: x[:, k // GROUP])
        done[:, k] = step.nearest(weight[:, k].float()).double()
        error = (weight[:, k] - done[:, k]) / inverse[0, 0]
        weight[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return done


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_make_up_for_each_other_as_in_the_paper(symmetric, monkeypatch):
    monkeypatch.setattr(module, "SWEEPS", 0)
    weight, _, gram = _case()
    grid = _grid(W4A16(GROUP, symmetric), weight)
    got = gptq(weight, gram, grid, GROUP)
    expected = _by_the_paper(weight, gram, grid, gram.diagonal().argsort(descending=True).tolist())
    different = (got.weight - expected).abs() > 1e-4
    assert different.float().mean() < 0.01  # float32 may fall to the other side of a tie and go on from there
    assert error_ratio(got.weight, expected) < 0.02
    assert got.note == ""


@pytest.mark.parametrize("scheme", [W4A16(GROUP, False), W4A16(GROUP, True), W8A8Int8(), W8A8Fp8()])
def test_outputs_are_nearer_than_by_rounding_to_nearest(scheme):
    weight, x, gram = _case()
    width = GROUP if isinstance(scheme, W4A16) else weight.shape[1]
    grid = _grid(scheme, weight, width)
    wide = grid.map(lambda s: s.repeat_interleave(width, 1))
    rounded, nearest = gptq(weight, gram, grid, width).weight, wide.nearest(weight)
    assert torch.equal(wide.nearest(rounded), rounded)  # it lies on the grid
    errors = [float((x @ (w - weight).T).square().sum()) for w in (rounded, nearest)]
    assert errors[0] < 0.7 * errors[1]


def test_a_last_group_may_be_narrower():
    weight, _, gram = _case()
    padded = torch.nn.functional.pad(weight[:, :140], (0, 20))
    grid = _grid(W4A16(GROUP, False), padded)
    wide = grid.map(lambda s: s.repeat_interleave(GROUP, 1)[:, :140])
    rounded = gptq(weight[:, :140], gram[:140, :140], grid, GROUP).weight
    assert torch.equal(wide.nearest(rounded), rounded)


def test_c02_dead_columns_are_rounded_to_nearest_and_change_nothing():
    weight, x, _ = _case()
    x[:, 40:50] = 0.0
    grid = _grid(W4A16(GROUP, False), weight)
    wide = grid.map(lambda s: s.repeat_interleave(GROUP, 1))
    got = gptq(weight, x.T @ x, grid, GROUP)
    assert torch.equal(got.weight[:, 40:50], wide.nearest(weight)[:, 40:50])
    all_dead = gptq(weight, torch.zeros(160, 160), grid, GROUP)
    assert torch.equal(all_dead.weight, wide.nearest(weight))


@pytest.mark.parametrize("dead", [0, 1, 10])
def test_c02_dead_columns_do_not_make_the_inputs_scale_matter(dead):
    weight, x, _ = _case()
    x[:, 40 : 40 + dead] = 0.0
    live = [k for k in range(160) if not 40 <= k < 40 + dead]
    grid = _grid(W4A16(GROUP, False), weight)
    grid = grid.map(lambda s: s.repeat_interleave(GROUP, 1))  # by column, so that some can be left out
    exact = gptq(weight, x.T @ x, grid, 1).weight
    powers = gptq(weight, (x * 2**-8).T @ (x * 2**-8), grid, 1).weight
    assert torch.equal(powers, exact)
    alone = gptq(weight[:, live], x[:, live].T @ x[:, live], grid.map(lambda s: s[:, live]), 1).weight

    def error(rounded):
        return float((x[:, live] @ (rounded - weight[:, live]).T).square().sum())

    assert (exact[:, live] != alone).float().mean() < 0.01  # sums in another order, ties to another side
    assert error(exact[:, live]) == pytest.approx(error(alone), rel=0.01)
    for scale in (0.01, 100.0):
        scaled = gptq(weight, (x * scale).T @ (x * scale), grid, 1).weight
        assert (scaled != exact).float().mean() < 0.01
        assert error(scaled[:, live]) == pytest.approx(error(exact[:, live]), rel=0.01)


def test_sweeps_only_lower_the_error_and_end_where_no_column_can_do_better(monkeypatch):
    weight, _, gram = _case()
    grid = _grid(W4A16(GROUP, False), weight)
    wide = grid.map(lambda s: s.repeat_interleave(GROUP, 1))
    damped = gram.double() + DAMP * gram.double().diagonal().mean() * torch.eye(160)
    errors = []
    for sweeps in (0, 1, 2, 40):
        monkeypatch.setattr(module, "SWEEPS", sweeps)
        rounded = gptq(weight, gram, grid, GROUP).weight
        assert torch.equal(wide.nearest(rounded), rounded)
        delta = (rounded - weight).double()
        errors.append(float(((delta @ damped) * delta).sum()))
    assert errors[0] > errors[1] > errors[2] >= errors[3]
    assert errors[2] < 0.97 * errors[0]
    best = rounded.double() - (delta @ damped) / damped.diagonal()  # of each column, all others as they are
    step = wide.step.double()
    assert ((best - rounded).abs() <= step * 0.501 + 1e-5).float().mean() > 0.999


def test_few_tokens_are_damped():
    weight, x, _ = _case()
    got = gptq(weight, x[:3].T @ x[:3], _grid(W4A16(GROUP, False), weight), GROUP)
    assert got.note == ""
    assert got.weight.isfinite().all()


def test_moments_that_are_not_positive_are_damped_more_then_rounded_to_nearest():
    weight, _, gram = _case()
    grid = _grid(W4A16(GROUP, False), weight)
    lowest = torch.linalg.eigvalsh(gram)[0]
    bad = gram - torch.eye(160) * (lowest + 0.3 * gram.diagonal().mean())
    got = gptq(weight, bad, grid, GROUP)
    assert got.note == "diagonal raised by 1 of its mean"
    worse = gram - torch.eye(160) * gram.diagonal().mean() * 0.9
    hopeless = -gram + torch.diag(2 * gram.diagonal())  # a positive diagonal, far from positive
    assert gptq(weight, worse, grid, GROUP).weight.isfinite().all()
    given_up = gptq(weight, hopeless * 1e3, grid, GROUP)
    if given_up.note.startswith("rounded to nearest"):
        wide = grid.map(lambda s: s.repeat_interleave(GROUP, 1))
        assert torch.equal(given_up.weight, wide.nearest(weight))
    assert given_up.note
    assert not weight.isnan().any()
