"""Gate and up in turns: activations, the meaning of the gated product, and its twin for few tokens."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.engine import activations
from qinfer.kernels import activation, activation_triton, gated_product, gated_product_triton
from qinfer.kernels.gated_product import TURN
from qinfer.kernels.panels import to_panels
from qinfer.kernels.w8a8_warps_triton import PIECE
from qinfer.model.linear import Linear, alternating
from qinfer.quant.w8a8_fp8 import W8A8Fp8
from qinfer.quant.w8a8_int8 import W8A8Int8
from qinfer.testing import error_ratio

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3 = torch.float8_e4m3fn


def in_turns(gate: Tensor, up: Tensor, turn: int, dim: int) -> Tensor:
    """Slices of both in turn, by the book."""
    slices = zip(gate.split(turn, dim), up.split(turn, dim), strict=True)
    return torch.cat([piece for pair in slices for piece in pair], dim)


def act(gate: Tensor, *, gelu: bool) -> Tensor:
    gate = gate.double()
    if not gelu:
        return gate / (1 + torch.exp(-gate))
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("module", [activation, activation_triton])
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize(("rows", "inner", "turn"), [(1, 64, 64), (3, 192, 64), (5, 96, 8), (2, 4160, 64)])
def test_activations_of_turns(module, gelu, rows, inner, turn) -> None:
    torch.manual_seed(0)
    gate, up = 3 * torch.randn(rows, inner, device=DEVICE), torch.randn(rows, inner, device=DEVICE)
    out = (module.gelu_mul if gelu else module.silu_mul)(in_turns(gate, up, turn, 1), turn)
    assert error_ratio(out, act(gate, gelu=gelu) * up.double()) < 1e-6


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("kind", [torch.int8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize("module", [gated_product, gated_product_triton], ids=["meaning", "twin"])
@pytest.mark.parametrize(("m", "k"), [(1, 2048), (3, 272), (20, 128), (0, 128)])
def test_gated_products(m, k, module, kind, gelu) -> None:
    """One token's inputs are so many that the twin cuts them into parts."""
    torch.manual_seed(1)
    inner = 3 * TURN
    codes, gate, up = (
        torch.randint(-128, 128, (rows, k), dtype=torch.int8)
        if kind is torch.int8
        else torch.randn(rows, k).to(kind)
        for rows in (m, inner, inner)
    )
    scale, scales = torch.rand(m, 1) + 0.5, [torch.rand(inner) / (2e4 if kind is torch.int8 else 40)] * 2
    both = [
        codes.double() @ weight.double().T * s * scale for weight, s in zip((gate, up), scales, strict=True)
    ]
    expected = act(both[0], gelu=gelu) * both[1]
    weight = to_panels(in_turns(gate.view(torch.int8), up.view(torch.int8), TURN, 0).view(kind))
    given = (codes, scale, weight, in_turns(*scales, TURN, 0))
    on_device = [tensor.to(DEVICE) for tensor in given]
    out = module.gated(*on_device, torch.float32, gelu=gelu)
    assert out.shape == (m, inner)
    if m:
        assert error_ratio(out.cpu(), expected) < 2e-6
    integers, int8_scale = module.gated_to_int8(*on_device, torch.float32, gelu=gelu)
    assert integers.dtype is torch.int8
    assert ((integers.cpu() * int8_scale.cpu() - expected).abs() <= 0.501 * int8_scale.cpu()).all()
    floats, fp8_scale = module.gated_to_fp8(*on_device, torch.float32, gelu=gelu)
    assert floats.dtype is E4M3
    if m:
        assert error_ratio(fp8_scale.cpu(), expected.abs().amax(1, keepdim=True) / 448) < 2e-6
        # the interpreter's rounding to e4m3 loses the carry
        interpreted = DEVICE.type == "cpu" and module is gated_product_triton
        assert error_ratio(floats.cpu().float() * fp8_scale.cpu(), expected) < (0.15 if interpreted else 0.05)


def test_all_mean_the_same_turns() -> None:
    """The kernel's pieces, the weights' turns, and the plan, which knows no torch."""
    assert PIECE.value == TURN == activations.TURN


@pytest.mark.parametrize("scheme", [W8A8Int8(), W8A8Fp8()], ids=lambda scheme: scheme.name)
def test_a_linear_of_alternating_shards(scheme) -> None:
    """Its outputs are those of gate and up, slice by slice; one shard that holds both is as good."""
    torch.manual_seed(2)
    gate, up = (scheme.quantize(torch.randn(192, 80), dtype=torch.float32) for _ in range(2))
    x = torch.randn(4, 80)
    cpu = torch.device("cpu")
    y_gate, y_up = (Linear([(scheme, t)], device=cpu, dtype=torch.float32)(x) for t in (gate, up))
    whole = scheme.fuse([gate, up])
    for shards in ([(scheme, gate), (scheme, up)], [(scheme, whole)]):
        linear = Linear(alternating(shards, TURN), device=cpu, dtype=torch.float32)
        assert torch.equal(linear(x), in_turns(y_gate, y_up, TURN, 1))
        # on a CPU the activation has no use for turns
        assert Linear.of_gate_and_up(shards, device=cpu, dtype=torch.float32).turn is None
