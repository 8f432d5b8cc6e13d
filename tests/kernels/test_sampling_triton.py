"""Sampling on a GPU against its meaning; where there is no GPU, in Triton's interpreter."""

import math
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import fused_sampling, fused_sampling_triton, sampling, sampling_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 150


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHUNK": 64, "ROOM": 8, "PIVOTS": 4}.items():
        monkeypatch.setattr(fused_sampling_triton, name, value)
    monkeypatch.setattr(sampling_triton, "CHUNK", 64)


def rows(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def random_logits(count: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def uniforms(count: int) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def test_rows_of_all_kinds_side_by_side() -> None:
    logits = random_logits(8)
    logits[3] = logits[3].round()  # many equal ones
    logits[4] = 1.0
    logits[5, 10:] = -math.inf
    logits[6, 3] = math.nan
    requests = (
        uniforms(8),
        rows(0, 1, 0.7, 1, 1, 0.5, 1, 1.3),
        rows(0, 0, 5, 0, 20, 0, 0, 90, dtype=torch.int64),
        rows(1, 0.9, 0.8, 0.5, 0.9, 0.99, 0.9, 0.7),
        rows(0, 0, 0.01, 0, 0, 0.1, 0, 0),
    )
    ids = fused_sampling_triton.sample(logits, *requests)
    assert ids.tolist() == fused_sampling.sample(logits, *requests).tolist()
    assert ids[0] == logits[0].argmax()
    assert ids[6] == -1
    alone = fused_sampling_triton.sample(logits[7:], *(x[7:] for x in requests))
    assert alone.tolist() == ids[7:].tolist()


def test_temperature_alone_and_greedy() -> None:
    logits = random_logits(3)
    logits[1] = 0.0
    temperature = rows(0.5, 0, 2)
    ids = fused_sampling_triton.sample(logits, uniforms(3), temperature)
    assert ids.tolist() == fused_sampling.sample(logits, uniforms(3), temperature).tolist()
    assert fused_sampling_triton.greedy(logits).tolist() == logits.argmax(1).tolist()
    assert ids[1] == 0
    logits[2, 77] = math.nan
    likeliest = fused_sampling.greedy(logits).tolist()
    assert fused_sampling_triton.greedy(logits).tolist() == likeliest == [int(logits[0].argmax()), 0, -1]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.8, 0.0), (3, 1.0, 0.0), (0, 1.0, 0.2), (140, 0.6, 0.0), (30, 0.9, 0.05)],
)
def test_filter_keeps_what_its_meaning_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(2, seed=top_k)
    logits[1] = (2 * logits[1]).round()
    limits = rows(top_k, top_k, dtype=torch.int64), rows(top_p, top_p), rows(min_p, min_p)
    assert torch.equal(
        sampling_triton.filter_logits(logits, *limits), sampling.filter_logits(logits, *limits)
    )


def test_min_p_keeps_to_the_last_bit() -> None:
    """Numbers next to each other around the largest + log(min_p), which float64 tells."""
    top, min_p = rows(3.7, 20.1, 1.5), rows(0.05, 0.3, 0.2)
    limits = top.double() + min_p.double().log()
    steps = torch.arange(-3, 3, dtype=torch.int32, device=DEVICE)
    logits = (limits.float().unsqueeze(1).view(torch.int32) + steps).view(torch.float32)
    logits = torch.cat((logits, top.unsqueeze(1)), 1)
    off = rows(0, 0, 0, dtype=torch.int64)
    kept = sampling_triton.filter_logits(logits, off, rows(1, 1, 1), min_p).isfinite()
    assert torch.equal(kept, logits.double() >= limits.unsqueeze(1))
    assert 1 < int(kept.sum()) < kept.numel()


def test_draws_invert_the_distribution() -> None:
    probs = torch.zeros(1, VOCAB)
    probs[0, [0, 70, 149]] = torch.tensor([0.1, 0.6, 0.3])
    uniform = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    drawn = sampling_triton.draw(probs.log().expand(10, -1).contiguous().to(DEVICE), uniform.to(DEVICE))
    assert drawn.tolist() == [0] + 6 * [70] + 3 * [149]
    ends = rows(0.0, 1 - 2**-53, dtype=torch.float64)
    inner = torch.full((2, VOCAB), -math.inf, device=DEVICE)
    inner[:, 66:69] = 0.0
    assert sampling_triton.draw(inner, ends).tolist() == [66, 68]


def test_logprobs_and_ranks() -> None:
    logits = random_logits(2)
    ids = torch.tensor([5, 149], device=DEVICE)
    ours, theirs = sampling_triton.token_logprobs(logits, ids, 3), sampling.token_logprobs(logits, ids, 3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)


def test_penalties() -> None:
    logits = random_logits(2)
    counts = torch.randint(0, 3, (2, VOCAB), device=DEVICE).float()
    seen = (counts > 0) | (torch.rand(2, VOCAB, device=DEVICE) < 0.5)
    arguments = logits, seen, counts, rows(1.3, 1.0), rows(0.0, 0.5), rows(0.7, -0.2)
    expected = sampling.apply_penalties(*arguments)
    torch.testing.assert_close(sampling_triton.apply_penalties(*arguments), expected, atol=1e-6, rtol=0)
    columns = torch.stack(arguments[3:], dim=1).unbind(1)  # of a table with a row per sequence
    found = sampling_triton.apply_penalties(*arguments[:3], *columns)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
