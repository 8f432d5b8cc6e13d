"""AWQ's candidates against the paper's formula, and the inputs that broke other tools."""

import pytest
import torch

from qinfer.calibrate import awq


def test_relative_magnitude_is_the_mean_share_of_the_groups_maximum():
    weight = torch.tensor([[1.0, -4.0, 2.0, 2.0], [0.0, 0.0, -8.0, 4.0]])
    got = awq.relative_magnitude(weight, 2)
    assert got.tolist() == pytest.approx([(0.25 + 0) / 2, (1 + 0) / 2, (1 + 1) / 2, (1 + 0.5) / 2], rel=1e-5)


def test_plain_scale_is_a_power_of_the_mean_centred_on_one():
    x = torch.tensor([0.1, 1.0, 10.0, 40.0])
    scale = awq.awq_scale(x, torch.ones(4), 0.5, duo=False)
    assert (scale.max() * scale.min()).item() == pytest.approx(1.0, rel=1e-6)
    torch.testing.assert_close(scale / scale[0], (x / x[0]).sqrt())


def test_duo_scale_divides_by_the_weights_magnitude():
    x, w = torch.tensor([0.1, 1.0, 10.0]), torch.tensor([0.5, 0.25, 0.125])
    scale = awq.awq_scale(x, w, 0.4, duo=True)
    raw = x**0.4 / (w**0.6 + 1e-4)
    torch.testing.assert_close(scale / scale[0], raw / raw[0])


def test_grid_has_the_identity_first_then_half_plain_and_half_duo():
    grid = list(awq.candidates(torch.linspace(0.1, 1.1, 8), torch.linspace(0.9, 0.2, 8)))
    assert len(grid) == 1 + 20
    assert grid[0][1].tolist() == [1.0] * 8
    assert [setting["duo"] for setting, _ in grid] == [0] + [0] * 10 + [1] * 10
    assert len({tuple(scale.tolist()) for _, scale in grid}) == 21


def test_c03_dead_and_huge_channels_give_finite_positive_scales():
    x = torch.rand(128) + 0.1
    x[3], x[70] = 0.0, 1e5
    weight = torch.randn(32, 128)
    weight[:, 64:96] = 0.0  # a whole group of 32
    w = awq.relative_magnitude(weight, 32)
    for setting, scale in awq.candidates(x, w):
        assert torch.isfinite(scale).all(), setting
        assert (scale > 0).all(), setting
        assert scale[3] == 1.0
        assert (scale[64:96] == 1.0).all()


def test_all_channels_dead_gives_ones():
    for _, scale in awq.candidates(torch.zeros(16), torch.zeros(16)):
        assert scale.tolist() == [1.0] * 16
