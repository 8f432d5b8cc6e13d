"""Products inside a model on a GPU: partial sums that the next op adds up, biases inside, an int8 head."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qinfer import backend, ops
from qinfer.model.head import make_head
from qinfer.model.linear import Linear
from qinfer.quant import Scheme, scheme_by_name
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

SCHEMES = ("w8a8-int8", "w8a8-fp8", "w8a16-int8", "w4a16")
WIDTH, INPUTS = 1024, 4096  # a product of few tokens that every scheme cuts along its inputs
DEVICE = torch.device("cuda")
each_scheme = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every op is compared with its meaning as well, partial sums by what they add up to."""
    monkeypatch.setenv("QINFER_BACKEND", "triton")
    monkeypatch.setenv("QINFER_CHECK", "1")
    backend.settings.cache_clear()
    yield
    monkeypatch.undo()
    backend.settings.cache_clear()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def random_linear(name: str, bias: Tensor | None = None) -> tuple[Linear, Tensor, Scheme]:
    """A linear, and its weight [N, K] float64 as it was rounded."""
    scheme = scheme_by_name(name)
    tensors = scheme.quantize(torch.randn(WIDTH, INPUTS) / 64, dtype=torch.bfloat16)
    linear = Linear([(scheme, tensors)], bias, device=DEVICE, dtype=torch.bfloat16)
    return linear, scheme.dequantize(tensors).double().cuda(), scheme


@each_scheme
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64])
def test_the_next_norm_adds_up_the_parts(name: str, rows: int) -> None:
    linear, weight, scheme = random_linear(name)
    x, residual, norm = randn(rows, INPUTS), randn(rows, WIDTH), randn(WIDTH)
    parts = linear.summand(x)
    assert isinstance(parts, ops.Parts)
    assert parts.sums.shape[1:] == (rows, WIDTH)
    assert len(parts.sums) > 1
    exact = scheme.fake_quantize(x).double() @ weight.T
    bound = 8e-3 if scheme.activations.value != "none" else 4e-3
    assert error_ratio(ops.scaled(parts), exact) < bound
    for codes in (None, torch.int8, torch.float8_e4m3fn):
        normed, total = ops.add_rms_norm_to(codes, parts, residual, norm, 1e-5)
        assert error_ratio(total, exact + residual.double()) < bound
        again, _ = ops.add_rms_norm_to(codes, linear.summand(x), residual, norm, 1e-5)
        for ours, theirs in zip(numbers(normed), numbers(again), strict=True):
            assert torch.equal(ours, theirs)
    assert error_ratio(linear(x), exact) < bound


def numbers(x: Any) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else (x.values.view(torch.uint8), x.scale)


@each_scheme
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_a_bias_is_added_before_the_one_rounding(name: str, rows: int) -> None:
    bias = 100 * randn(WIDTH)
    linear, weight, scheme = random_linear(name, bias)
    x = randn(rows, INPUTS)
    exact = scheme.fake_quantize(x).double() @ weight.T + bias.double()
    assert error_ratio(linear(x), exact) < 3e-3
    assert isinstance(linear.summand(x), Tensor)  # there is nobody else to add the bias


@pytest.mark.parametrize("vocab", [1001, 49_152])
def test_an_int8_head(vocab: int) -> None:
    weight = randn(vocab, 576)
    for rows in (1, 5, 64, 300):
        hidden = randn(rows, 576)
        logits = make_head(weight, "int8")(hidden)[:, :vocab]
        assert error_ratio(logits, hidden.double() @ weight.double().T) < 1e-2
