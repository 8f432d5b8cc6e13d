"""Plain causal attention against a loop over rows in float64, and that what is hidden is not seen."""

import pytest
import torch
from torch import Tensor

from qinfer import ops
from qinfer.testing import error_ratio


def by_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        first = 0 if window is None else max(0, row - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : row + 1, head // group].double()
            scores = scale * keys @ q[row, head].double()
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = scores.softmax(0) @ v[first : row + 1, head // group].double()
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(kv_heads: int, window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    q = torch.randn(2 * 19, 4, 16)
    k, v = torch.randn(2 * 19, kv_heads, 16), torch.randn(2 * 19, kv_heads, 16)
    out = ops.attention(q, k, v, num_sequences=2, scale=0.3, window=window, softcap=softcap)
    for part in (slice(0, 19), slice(19, 38)):
        expected = by_rows(q[part], k[part], v[part], 0.3, window, softcap)
        assert error_ratio(out[part], expected) < 1e-6


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_later_tokens_and_other_sequences_are_not_seen(softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2 * 8, 2, 16), torch.randn(2 * 8, 2, 16), torch.randn(2 * 8, 2, 16)

    def run() -> Tensor:
        return ops.attention(q, k, v, num_sequences=2, scale=0.25, window=None, softcap=softcap)

    before = run()
    k[5:8], k[8:] = 1e4, -1e4  # end of the first sequence, all of the second
    v[5:8], v[8:] = 1e4, -1e4
    assert torch.equal(run()[:5], before[:5])


def test_views_of_a_fused_projection() -> None:
    torch.manual_seed(0)
    fused = torch.randn(9, 8, 16)
    parts = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    arguments = {"num_sequences": 1, "scale": 0.25, "window": 4, "softcap": None}
    assert torch.equal(
        ops.attention(*parts, **arguments), ops.attention(*(x.contiguous() for x in parts), **arguments)
    )
