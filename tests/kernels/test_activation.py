"""Gated activations against their formulas in float64."""

import math

import pytest
import torch
from torch import Tensor

from qinfer import ops
from qinfer.testing import error_ratio

BOUND = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # bfloat16: activation and product are both rounded


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("op", "formula"), [(ops.silu_mul, silu), (ops.gelu_mul, gelu_tanh)])
def test_gate_comes_first(op, formula, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = 3 * torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype)
    out = op(torch.cat((gate, up), -1))
    assert out.dtype == dtype
    assert error_ratio(out, formula(gate.double()) * up.double()) < BOUND[dtype]
