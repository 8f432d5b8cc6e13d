"""SmoothQuant's scale against the paper's formula, and its edges."""

import pytest
import torch

from qinfer.calibrate import smoothquant


def test_scale_is_the_papers_formula():
    x, w = torch.tensor([100.0, 1.0, 0.25]), torch.tensor([0.5, 2.0, 0.01])
    for alpha in (0.3, 0.5, 0.9):
        expected = [a**alpha / b ** (1 - alpha) for a, b in zip(x.tolist(), w.tolist(), strict=True)]
        assert smoothquant.smoothing_scale(x, w, alpha).tolist() == pytest.approx(expected, rel=1e-6)


def test_half_balances_the_maxima_of_inputs_and_columns():
    x, w = torch.rand(64) * 50 + 0.1, torch.rand(64) + 0.1
    scale = smoothquant.smoothing_scale(x, w, 0.5)
    torch.testing.assert_close(x / scale, w * scale)


def test_alpha_zero_means_no_smoothing():
    scale = smoothquant.smoothing_scale(torch.tensor([7.0, 3.0]), torch.tensor([0.1, 9.0]), 0.0)
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("alpha", smoothquant.ALPHAS)
def test_dead_channels_keep_one(alpha):
    x, w = torch.tensor([0.0, 5.0, 0.0, 1e5]), torch.tensor([1.0, 0.0, 0.0, 1e-9])
    scale = smoothquant.smoothing_scale(x, w, alpha)
    assert scale[:3].tolist() == [1.0, 1.0, 1.0]
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


def test_grid_starts_without_smoothing_and_rises():
    alphas = [setting["alpha"] for setting, _ in smoothquant.candidates(torch.ones(4), torch.ones(4))]
    assert alphas == [0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
