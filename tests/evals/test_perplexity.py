"""Perplexity divides totals, names its unit, and never compares unlike ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from qinfer.errors import UserError
from qinfer.evals.perplexity import likelihoods, perplexity, ratio, token_perplexity


def test_e07_totals_are_divided_not_means_averaged() -> None:
    measured = token_perplexity([torch.full((512,), 2.0), torch.full((64,), 3.0)])
    assert measured.value == pytest.approx(8.257, abs=5e-4)
    assert (measured.unit, measured.units) == ("token", 576)
    assert measured.nll == pytest.approx(1216)


def test_e08_units_of_one_likelihood() -> None:
    nll, words, tokens, num_bytes = 1000.0, 200, 300, 1200
    assert perplexity(nll, words, "word").value == pytest.approx(math.exp(5))
    assert perplexity(nll, tokens, "token").value == pytest.approx(math.exp(10 / 3))
    assert perplexity(nll, num_bytes, "byte").bits == pytest.approx(nll / (num_bytes * math.log(2)))


def test_e08_unlike_units_are_refused() -> None:
    assert ratio(perplexity(20.0, 10, "token"), perplexity(10.0, 10, "token")) == pytest.approx(math.e)
    with pytest.raises(
        UserError, match="per word over 10 cannot be compared with perplexity per token over 10"
    ):
        ratio(perplexity(20.0, 10, "word"), perplexity(10.0, 10, "token"))
    with pytest.raises(UserError, match="per token over 11 cannot be compared"):
        ratio(perplexity(20.0, 11, "token"), perplexity(10.0, 10, "token"))


def test_e10_nothing_scored_is_not_a_number() -> None:
    assert math.isnan(token_perplexity([]).value)
    assert math.isnan(token_perplexity([]).bits)
    assert math.isnan(token_perplexity([torch.tensor([1.0, math.nan])]).value)


@pytest.mark.parametrize("rows", [1, 3, 9, 10, 256])
def test_likelihoods_equal_cross_entropy_however_the_logits_are_sliced(rows: int) -> None:
    values = torch.randn(10, 31, generator=torch.Generator().manual_seed(0))
    token_ids = torch.randint(31, (10,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(ids: Sequence[int]) -> Iterator[Tensor]:
        assert list(ids) == token_ids
        yield from values.split(rows)

    (nll,) = likelihoods(logits, [token_ids])
    expected = torch.nn.functional.cross_entropy(values[:-1], torch.tensor(token_ids[1:]), reduction="none")
    torch.testing.assert_close(nll, expected)
