"""Row-wise kernels on a GPU: 16-bit dtypes, widths of published models, graphs, offsets past 2^31."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import (
    activation_triton,
    fused_activation_triton,
    fused_norm_triton,
    norm_triton,
    quantize_per_token,
    quantize_per_token_triton,
    rope,
    rope_angles_triton,
    rope_triton,
)
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

WIDTHS = (576, 896, 2560, 3584, 4096, 5120, 8192, 16384)
GATED = (1536, 4864, 8960, 11008, 14336, 18944, 28672)
ROWS = (1, 2, 17, 129, 4097)
BOUND = {torch.bfloat16: 2.0**-8.5, torch.float16: 2.0**-11}  # one rounding
EPS = 1e-5


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What the ops allocate next holds NaN (and codes of -1) where nothing is written."""
    torch.full((1 << 27,), math.nan, device="cuda")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def normed(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (offset + weight.double())


def check_codes(codes: Tensor, scale: Tensor, expected: Tensor) -> None:
    """The nearest codes to expected [T, N] float64: half a step of int8, half of the last bit of e4m3."""
    largest = 127.0 if codes.dtype == torch.int8 else 448.0
    assert error_ratio(scale, expected.abs().amax(-1, keepdim=True) / largest) < 1e-6
    off = (codes.double() * scale.double() - expected).abs()
    if codes.dtype == torch.int8:
        assert bool((off <= 0.501 * scale.double()).all())
    else:
        assert bool((off <= 1.001 * torch.maximum(expected.abs() / 16, scale.double() / 1024)).all())


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype) -> None:
    weight = randn(width, dtype=dtype)
    for rows in ROWS:
        x, residual = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
        assert error_ratio(norm_triton.rms_norm(x, weight, EPS), normed(x, weight, 0.0)) < BOUND[dtype]
        out, total = norm_triton.add_rms_norm(x, residual, weight, EPS, 1.0, 0.22)
        assert error_ratio(total, residual.double() + 0.22 * x.double()) < BOUND[dtype]
        assert error_ratio(out, normed(total, weight, 1.0)) < BOUND[dtype]


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_to_codes(width: int) -> None:
    weight = randn(width)
    for rows in ROWS:
        x, residual = randn(rows, width), randn(rows, width)
        for op in (fused_norm_triton.add_rms_norm_int8, fused_norm_triton.add_rms_norm_fp8):
            codes, scale, total = op(x, residual, weight, EPS, 1.0)
            assert torch.equal(total, x + residual)
            check_codes(codes, scale, normed(total, weight, 1.0))


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_partial_sums(parts: int) -> None:
    for rows in (1, 33):
        x, residual, weight = torch.randn(parts, rows, 4096, device="cuda"), randn(rows, 4096), randn(4096)
        codes, scale, total = fused_norm_triton.add_rms_norm_int8(x, residual, weight, EPS, 0.0, 0.5)
        assert error_ratio(total, residual.double() + 0.5 * x.double().sum(0)) < BOUND[torch.bfloat16]
        check_codes(codes, scale, normed(total, weight, 0.0))
        out, again = fused_norm_triton.add_rms_norm_parts(x, residual, weight, EPS, 0.0, 0.5)
        assert torch.equal(again, total)
        assert error_ratio(out, normed(total, weight, 0.0)) < BOUND[torch.bfloat16]
        alone = fused_norm_triton.rms_norm_parts(x, weight, EPS, 1.0, torch.bfloat16)
        assert error_ratio(alone, normed(x.sum(0), weight, 1.0)) < BOUND[torch.bfloat16]


def gated(name: str, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if name == "silu_mul":
        return gate * torch.sigmoid(gate) * up
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("width", GATED)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations(name: str, width: int) -> None:
    for rows in (1, 16, 17, 64, 65, 1025):
        gate_up = 3 * randn(rows, 2 * width)
        expected = gated(name, gate_up)
        out = getattr(activation_triton, name)(gate_up)
        assert error_ratio(out, expected) < BOUND[torch.bfloat16]
        for kind in ("int8", "fp8"):
            check_codes(*getattr(fused_activation_triton, f"{name}_{kind}")(gate_up), expected)


@pytest.mark.parametrize("width", [1536, 4864, 14336, 18944, 28672])
def test_gated_activations_of_partial_sums(width: int) -> None:
    for rows, parts in ((1, 4), (16, 2), (17, 8), (33, 4), (64, 4), (65, 3)):
        gate_up = torch.randn(parts, rows, 2 * width, device="cuda")
        expected = gated("silu_mul", gate_up.double().sum(0))
        out = fused_activation_triton.silu_mul_parts(gate_up, torch.bfloat16)
        assert error_ratio(out, expected) < BOUND[torch.bfloat16]
        for op in (fused_activation_triton.silu_mul_int8, fused_activation_triton.silu_mul_fp8):
            check_codes(*op(gate_up), expected)


def test_programs_that_share_a_row_agree_on_broken_rows() -> None:
    gate_up = randn(4, 2 * 28672)
    gate_up[1, 28671], gate_up[2] = math.nan, 0.0
    codes, scale = fused_activation_triton.silu_mul_int8(gate_up)
    alone = [fused_activation_triton.silu_mul_int8(row.unsqueeze(0)) for row in gate_up]
    assert torch.equal(scale.isnan().flatten(), torch.tensor([False, True, False, False], device="cuda"))
    assert float(scale[2]) == torch.finfo(torch.float32).tiny
    for i in (0, 2, 3):
        assert torch.equal(codes[i], alone[i][0][0])
        assert torch.equal(scale[i], alone[i][1][0])


@pytest.mark.parametrize("name", ["int8_per_token", "fp8_per_token"])
def test_codes_are_those_of_the_meaning(name: str) -> None:
    """A quotient of another last bit moves a code only where it is a rounding tie."""
    x = randn(129, 4096, dtype=torch.float32)
    codes, scale = getattr(quantize_per_token_triton, name)(x)
    expected, expected_scale = getattr(quantize_per_token, name)(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert float((codes.float() != expected.float()).double().mean()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("half", "magnitude"), [(64, 1.0), (48, 1.19), (12, 1.0)])
def test_rope_angles_of_long_contexts(half: int, magnitude: float, dtype: torch.dtype) -> None:
    positions = torch.cat((torch.arange(999), 1_000_003 - torch.arange(999))).cuda()
    frequencies = 500_000.0 ** (-torch.arange(half, device="cuda") / half)
    cos, sin = rope_angles_triton.rope_angles(positions, frequencies, magnitude, dtype)
    angles = (positions[:, None].float() * frequencies).double()
    bound = magnitude * (2.0**-8 if dtype == torch.bfloat16 else 4e-7)  # half of what bfloat16 steps by at 1
    assert (cos.double() - magnitude * torch.cat((angles.cos(),) * 2, 1)).abs().max() < bound
    assert (sin.double() - magnitude * torch.cat((-angles.sin(), angles.sin()), 1)).abs().max() < bound


def test_rope() -> None:
    heads = randn(65, 40, 192)[:, 3:35, :128]
    cos, sin = randn(65, 128), randn(65, 128)
    expected = rope.rope(heads.double(), cos.double(), sin.double())
    assert error_ratio(rope_triton.rope(heads, cos, sin), expected) < BOUND[torch.bfloat16]


def test_a_captured_chain_follows_its_inputs() -> None:
    """Kernels that start before their predecessor has ended read only what it has written."""
    x, residual, weight, gate_up = randn(16, 4096), randn(16, 4096), randn(4096), randn(16, 28672)

    def chain() -> tuple[Tensor, ...]:
        hidden, total = norm_triton.add_rms_norm(x, residual, weight, EPS)
        for _ in range(20):
            hidden, total = norm_triton.add_rms_norm(hidden, total, weight, EPS)
            codes, scale = fused_activation_triton.silu_mul_int8(gate_up + hidden.repeat(1, 7))
        return *fused_norm_triton.add_rms_norm_int8(hidden, total, weight, EPS), codes, scale

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        x.normal_()
        residual.normal_()
        graph.replay()
        for ours, theirs in zip(captured, chain(), strict=True):
            assert torch.equal(ours, theirs)


def test_the_same_inputs_give_the_same_bits() -> None:
    x, residual, weight = randn(257, 8192), randn(257, 8192), randn(8192)
    parts, gate_up = torch.randn(5, 64, 8192, device="cuda"), randn(257, 2 * 14336)
    for op in (
        lambda: norm_triton.add_rms_norm(x, residual, weight, EPS, 1.0),
        lambda: fused_norm_triton.add_rms_norm_int8(x, residual, weight, EPS),
        lambda: fused_norm_triton.add_rms_norm_fp8(parts, residual[:64], weight, EPS),
        lambda: fused_activation_triton.gelu_mul_int8(gate_up),
        lambda: fused_activation_triton.silu_mul_fp8(gate_up[:16]),
        lambda: fused_activation_triton.silu_mul_fp8(parts.repeat(1, 1, 3)),
        lambda: quantize_per_token_triton.int8_per_token(gate_up),
    ):
        first = [out.view(torch.uint8) for out in op()]
        for _ in range(20):
            assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(first, op(), strict=True))


@pytest.mark.large_gpu_memory
def test_offsets_past_two_to_the_31() -> None:
    rows, width = 80_000, 14336
    gate_up = torch.zeros(rows, 2 * width, device="cuda", dtype=torch.bfloat16)
    gate_up[-1] = randn(2 * width)
    codes, scale = fused_activation_triton.silu_mul_int8(gate_up)
    last, last_scale = fused_activation_triton.silu_mul_int8(gate_up[-1:])
    assert torch.equal(codes[-1:], last)
    assert torch.equal(scale[-1:], last_scale)
    assert torch.equal(activation_triton.silu_mul(gate_up)[-1:], activation_triton.silu_mul(gate_up[-1:]))
    total = fused_norm_triton.rms_norm_int8(gate_up, randn(2 * width), EPS)
    assert total[0][:-1].count_nonzero() == 0
    assert total[0][-1].count_nonzero() > width
