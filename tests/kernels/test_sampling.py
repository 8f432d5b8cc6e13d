"""Sampling on rows of logits: published formulas, boundaries and the drawn distribution."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qinfer import ops
from qinfer.kernels.sampling import NUCLEUS_CANDIDATES


def full(rows: int, value: float) -> Tensor:
    return torch.full((rows,), value)


def kept(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[set[int]]:
    rows = len(logits)
    out = ops.filter_logits(logits, torch.full((rows,), top_k), full(rows, top_p), full(rows, min_p))
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in out]


def test_p06_repetition_penalty_multiplies_negative_logits_once() -> None:
    logits = torch.tensor([[2.0, -2.0]])
    counts = torch.tensor([[1.0, 3.0]])
    out = ops.apply_penalties(logits, counts > 0, counts, full(1, 1.5), full(1, 0.0), full(1, 0.0))
    assert torch.allclose(out, torch.tensor([[1.3333333, -3.0]]))


def test_frequency_counts_and_presence_does_not() -> None:
    counts = torch.tensor([[0.0, 1.0, 3.0]])
    out = ops.apply_penalties(
        torch.zeros(1, 3), counts > 0, counts, full(1, 1.0), full(1, 0.5), full(1, 0.25)
    )
    assert out.tolist() == [[0.0, -0.75, -1.75]]


def test_p07_counts_ignore_padding() -> None:
    ids = torch.tensor([[1, 1, 3], [0, 4, 4]])  # vocabulary 4: 4 pads
    assert ops.token_counts(ids, 4).tolist() == [[0, 2, 0, 1], [1, 0, 0, 0]]


def test_top_k_keeps_the_largest_and_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert kept(logits, top_k=2) == [{1, 2}]
    assert kept(logits, top_k=0) == kept(logits, top_k=4) == kept(logits, top_k=99) == [{0, 1, 2, 3}]
    assert kept(torch.tensor([[1.0, 1.0, 0.0]]), top_k=1) == [{0, 1}]


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(logits, min_p=0.25) == [{0, 1, 2}]
    assert kept(logits, min_p=1.0) == [{0}]


def test_min_p_keeps_to_the_last_bit() -> None:
    """A logit stays where it is at least the largest + log(min_p), which 40 decimal digits tell here."""
    generator = torch.Generator().manual_seed(0)
    min_p = torch.rand(64, generator=generator).clamp_min(1e-6)
    top = 30 * torch.rand(64, 1, generator=generator)
    near = (top.double() + min_p.double().log().unsqueeze(1)).float()
    steps = torch.arange(-4, 4, dtype=torch.int32)
    logits = torch.cat(((near.view(torch.int32) + steps).view(torch.float32), top), 1)
    out = ops.filter_logits(logits, torch.zeros(64, dtype=torch.int64), full(64, 1.0), min_p)
    with localcontext(prec=40):
        for row, filtered, least in zip(
            logits.tolist(), out.isfinite().tolist(), min_p.tolist(), strict=True
        ):
            limit = Decimal(max(row)) + Decimal(least).ln()
            assert filtered == [Decimal(x) >= limit for x in row]


def test_p03_top_p_at_its_boundaries() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(logits, top_p=1.0) == [{0, 1, 2, 3}]
    assert kept(logits, top_p=1e-9) == [{0}]
    assert kept(logits, top_p=0.499) == [{0}]
    assert kept(logits, top_p=0.501) == [{0, 1}]
    assert kept(logits, top_p=0.9) == [{0, 1, 2}]


def test_top_p_beyond_the_first_candidates_sorts_everything() -> None:
    logits = torch.randn(2, 3 * NUCLEUS_CANDIDATES, generator=torch.Generator().manual_seed(0)) * 0.1
    logits[1, 7] = 30.0  # this row's nucleus is one token
    probs, order = logits[0].double().softmax(0).sort(descending=True)
    count = int((probs.cumsum(0) - probs < 0.9).sum())
    assert count > NUCLEUS_CANDIDATES
    first, second = kept(logits, top_p=0.9)
    assert len(first ^ set(order[:count].tolist())) <= 1  # float32 may differ by one at the edge
    assert second == {7}


@settings(max_examples=100)
@given(
    values=st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-math.inf)), min_size=2, max_size=40),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_some_token_always_remains_and_only_those_are_drawn(
    values: list[float], top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    logits = torch.tensor([[*values, 0.0]])
    rows = torch.tensor([uniform], dtype=torch.float64)
    filtered = ops.filter_logits(logits, torch.tensor([top_k]), full(1, top_p), full(1, min_p))
    assert filtered.isfinite().any()
    token = int(ops.draw(filtered, rows))
    assert filtered[0, token].isfinite()
    assert not filtered.isnan().any()


def test_a_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = ops.draw(probs.log().expand(1000, 4), uniform)
    assert torch.bincount(tokens, minlength=4).tolist() == [100, 0, 600, 300]


def test_a_draw_at_the_ends_of_the_interval() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(2, 4)
    assert ops.draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_a_row_is_drawn_as_if_alone() -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(8, dtype=torch.float64)
    top_k, top_p, min_p = torch.tensor([0, 5, 0, 40, 0, 1, 0, 7]), full(8, 0.8), full(8, 0.01)
    together = ops.draw(ops.filter_logits(logits, top_k, top_p, min_p), uniform)
    for i in range(8):
        row = slice(i, i + 1)
        alone = ops.draw(ops.filter_logits(logits[row], top_k[row], top_p[row], min_p[row]), uniform[row])
        assert alone == together[i]


@pytest.mark.parametrize("chosen", [2, 3])
def test_p13_logprobs_are_the_raw_log_softmax_with_true_ranks(chosen: int) -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, -2.0, 2.0]])
    value, rank, top, ids = ops.token_logprobs(logits, torch.tensor([chosen]), 3)
    expected = logits.double().log_softmax(1)[0]
    assert value.item() == pytest.approx(expected[chosen].item(), abs=1e-6)
    assert rank.item() == {2: 2, 3: 5}[chosen]
    assert ids.tolist() == [[1, 2, 4]]
    assert top[0].tolist() == pytest.approx(expected[[1, 2, 4]].tolist(), abs=1e-6)
