"""The rotation against complex numbers: pair (i, i + R/2) is one complex number turned by its angle."""

import pytest
import torch
from torch import Tensor

from qinfer import ops
from qinfer.testing import error_ratio


def signed(angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize("rotary_dim", [32, 24, 2])
def test_rope_turns_complex_pairs(rotary_dim: int) -> None:
    torch.manual_seed(0)
    heads = torch.randn(5, 3, 32)
    angles = 10 * torch.randn(5, rotary_dim // 2, dtype=torch.float64)
    out = ops.rope(heads, *signed(angles))
    half = rotary_dim // 2
    pairs = torch.complex(heads[..., :half].double(), heads[..., half:rotary_dim].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert error_ratio(out[..., :rotary_dim], torch.cat((turned.real, turned.imag), -1)) < 1e-6
    assert torch.equal(out[..., rotary_dim:], heads[..., rotary_dim:])


def test_rope_reads_a_view_and_leaves_it() -> None:
    """Heads come as a slice of the fused projection; what lies beside it is not touched."""
    torch.manual_seed(0)
    fused = torch.randn(4, 6, 16)
    before = fused.clone()
    cos, sin = signed(torch.randn(4, 8, dtype=torch.float64))
    out = ops.rope(fused[:, :4], cos, sin)
    assert torch.equal(out, ops.rope(fused[:, :4].contiguous(), cos, sin))
    assert torch.equal(fused, before)
