"""The search keeps the strictly best candidate and refuses to start from a broken layer."""

import math

import pytest
import torch

from qinfer.calibrate.search import search_scale
from qinfer.errors import CheckpointError


def _candidates(*names):
    return [({"alpha": name}, torch.tensor([float(name) + 1])) for name in names]


def _search(losses):
    by_scale = {float(i) + 1: loss for i, loss in enumerate(losses)}
    return search_scale(
        "layer 0", "norm->qkv", _candidates(*range(len(losses))), lambda s: by_scale[s.item()]
    )


def test_least_loss_wins_and_the_identitys_is_reported():
    choice = _search([5.0, 4.0, 1.0, 2.0])
    assert (choice.setting, choice.loss, choice.unscaled_loss) == ({"alpha": 2}, 1.0, 5.0)


def test_ties_go_to_the_earlier_candidate():
    assert _search([5.0, 3.0, 3.0, 3.0]).setting == {"alpha": 1}
    assert _search([3.0, 3.0, 3.0]).setting == {"alpha": 0}


def test_c03_losses_that_are_not_finite_are_passed_over():
    choice = _search([5.0, math.nan, math.inf, 4.0])
    assert (choice.setting, choice.loss) == ({"alpha": 3}, 4.0)
    assert _search([5.0, math.nan, math.nan]).setting == {"alpha": 0}


def test_c03_error_names_layer_mapping_and_cause():
    with pytest.raises(CheckpointError, match=r"layer 0 norm->qkv: .* is nan; .*NaN or infinity"):
        _search([math.nan, 1.0])
