"""Row-wise GPU kernels against float64 formulas: in Triton's interpreter where there is no GPU."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

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
    rows_triton,
    tiles,
)
from qinfer.kernels.tiles import Declined
from qinfer.testing import error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 72  # no power of two, nor is 3 rows
EPS, OFFSET, MULTIPLIER = 1e-5, 1.0, 0.3
BOUND = {torch.float32: 1e-6, torch.float16: 2.0**-11}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (OFFSET + weight.double())


def check_codes(codes: Tensor, scale: Tensor, expected: Tensor) -> None:
    """Codes are the nearest ones; e4m3 only roughly in the interpreter, whose rounding loses the carry."""
    largest = LARGEST[codes.dtype]
    assert scale.shape == (*expected.shape[:-1], 1)
    assert error_ratio(scale, expected.abs().amax(-1, keepdim=True) / largest) < 1e-6
    off = (codes.double() * scale.double() - expected).abs()
    if codes.dtype == torch.int8:
        assert bool((off <= 0.501 * scale.double()).all())
    elif DEVICE == "cuda":
        assert bool((off <= 1.001 * torch.maximum(expected.abs() / 16, scale.double() / 1024)).all())
    else:
        assert bool((off <= expected.abs() / 2 + scale.double() / 512).all())
        assert float(off.norm() / expected.norm()) < 0.15
    assert codes.double().abs().amax(-1).eq(largest).all()


@pytest.fixture(params=[1, 2], ids=["one block", "two blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many blocks hold a row of LENGTH numbers in a norm."""
    monkeypatch.setattr(norm_triton, "FEW_ROWS", 0 if request.param == 2 else 512)
    assert bool(norm_triton._entry("interpreter", 3, LENGTH, 1)["REST"]) == (request.param == 2)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", BOUND)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = (
        randn(3, LENGTH, dtype=dtype),
        randn(3, LENGTH, dtype=dtype),
        randn(LENGTH, dtype=dtype),
    )
    heads = randn(2, 3, 2 * LENGTH, dtype=dtype)[..., :LENGTH]
    assert error_ratio(norm_triton.rms_norm(heads, weight, EPS, OFFSET), normed(heads, weight)) < BOUND[dtype]
    out, total = norm_triton.add_rms_norm(x, residual, weight, EPS, OFFSET, MULTIPLIER)
    assert out.dtype == total.dtype == dtype
    assert error_ratio(total, residual.double() + MULTIPLIER * x.double()) < BOUND[dtype]
    assert error_ratio(out, normed(total, weight)) < BOUND[dtype]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("kind", ["int8", "fp8", "parts"])
def test_fused_norms(kind: str, parts: int) -> None:
    x = randn(parts, 3, LENGTH) if parts else randn(3, LENGTH, dtype=torch.float16)
    residual, weight = randn(3, LENGTH, dtype=torch.float16), randn(LENGTH, dtype=torch.float16)
    op = getattr(fused_norm_triton, f"add_rms_norm_{kind}")
    *out, total = op(x, residual, weight, EPS, OFFSET, MULTIPLIER)
    wide = x.double().sum(0) if parts else x.double()
    assert error_ratio(total, residual.double() + MULTIPLIER * wide) < BOUND[torch.float16]
    if kind == "parts":
        assert out[0].dtype == torch.float16
        assert error_ratio(out[0], normed(total, weight)) < BOUND[torch.float16]
        alone = fused_norm_triton.rms_norm_parts(x, weight, EPS, OFFSET, torch.float16)
        assert error_ratio(alone, normed(wide, weight)) < BOUND[torch.float16]
    else:
        check_codes(*out, normed(total, weight))
        check_codes(
            *getattr(fused_norm_triton, f"rms_norm_{kind}")(x, weight, EPS, OFFSET), normed(wide, weight)
        )


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations(name: str, parts: int) -> None:
    gate_up = 3 * randn(*([parts] if parts else []), 3, 2 * LENGTH)
    gate, up = (gate_up.double().sum(0) if parts else gate_up.double()).chunk(2, -1)
    if name == "gelu_mul":
        expected = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    else:
        expected = gate / (1 + torch.exp(-gate)) * up
    if parts:
        out = getattr(fused_activation_triton, f"{name}_parts")(gate_up, torch.float16)
        assert out.dtype == torch.float16
        assert error_ratio(out, expected) < BOUND[torch.float16]
    else:
        assert error_ratio(getattr(activation_triton, name)(gate_up), expected) < BOUND[torch.float32]
    for kind in ("int8", "fp8"):
        check_codes(*getattr(fused_activation_triton, f"{name}_{kind}")(gate_up), expected)


def test_long_rows_of_partial_sums_are_taken_in_steps() -> None:
    length = activation_triton.part_formula(3, 8192)["LANES"] + 408  # the interpreter has no table
    gate_up = 3 * randn(2, 3, 2 * length)
    gate_up[1, 1, length - 1] = math.nan  # in the last step
    gate, up = gate_up.double().sum(0).chunk(2, -1)
    codes, scale = fused_activation_triton.silu_mul_int8(gate_up)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    check_codes(codes[::2], scale[::2], (gate / (1 + torch.exp(-gate)) * up)[::2])


def test_activations_of_huge_gates_are_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -80.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for op in (activation_triton.silu_mul, activation_triton.gelu_mul):
        torch.testing.assert_close(
            op(gate_up).cpu(), torch.tensor([[0.0, 1e4, 0.0, 0.0]]), atol=1e-30, rtol=1e-6
        )


def test_codes_of_a_token() -> None:
    x = randn(3, LENGTH + 5, dtype=torch.float16)[:, 2 : LENGTH + 2]
    for name in ("int8_per_token", "fp8_per_token"):
        check_codes(*getattr(quantize_per_token_triton, name)(x), x.double())


def test_broken_and_empty_rows_get_the_scales_of_the_meaning() -> None:
    x = randn(4, LENGTH)
    x[0, 7], x[1, 9], x[2] = math.nan, math.inf, 0.0
    for name in ("int8_per_token", "fp8_per_token"):
        codes, scale = getattr(quantize_per_token_triton, name)(x)
        expected = getattr(quantize_per_token, name)(x)[1]
        torch.testing.assert_close(scale, expected, equal_nan=True)
        assert codes[2].float().abs().max() == 0
    weight = torch.ones(LENGTH, device=DEVICE)
    scale = fused_norm_triton.rms_norm_int8(x, weight, EPS)[1].flatten()
    assert scale.isnan().tolist() == [True, True, False, False]


def test_int8_codes_round_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.49]], device=DEVICE)
    codes, _ = quantize_per_token_triton.int8_per_token(x)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -126, 0]]


@pytest.mark.parametrize("rotary_dim", [24, 16])
def test_rope(rotary_dim: int) -> None:
    heads = randn(3, 4, 40)[:, 1:, :24]
    cos, sin = randn(3, rotary_dim), randn(3, rotary_dim)
    out = rope_triton.rope(heads, cos, sin)
    assert error_ratio(out, rope.rope(heads.double(), cos.double(), sin.double())) < 1e-6


@pytest.mark.parametrize(("half", "magnitude"), [(12, 1.0), (16, 1.25)])
def test_rope_angles(half: int, magnitude: float) -> None:
    positions = torch.randint(0, 1000, (11,), device=DEVICE)
    frequencies = torch.rand(half, device=DEVICE)
    cos, sin = rope_angles_triton.rope_angles(positions, frequencies, magnitude, torch.float32)
    angles = (positions[:, None].float() * frequencies).double()  # rounded as a model rounds them
    expected = (
        magnitude * torch.cat((angles.cos(),) * 2, 1),
        magnitude * torch.cat((-angles.sin(), angles.sin()), 1),
    )
    assert (cos - expected[0]).abs().max() < 1e-6
    assert (sin - expected[1]).abs().max() < 1e-6


def test_what_does_not_fit_is_declined() -> None:
    with pytest.raises(Declined, match="rows of 32769 numbers"):
        quantize_per_token_triton.int8_per_token(torch.empty(1, rows_triton.MAX_LANES + 1, device=DEVICE))
    with pytest.raises(Declined, match="17 partial sums"):
        fused_activation_triton.silu_mul_int8(torch.empty(17, 1, 8, device=DEVICE))


def test_programs_that_wait_for_each_other_fit_an_h200_together() -> None:
    """132 multiprocessors, each with 65536 registers for 2048 threads; a program gets at least one."""
    ops = json.loads(Path(tiles.__file__).with_name("configs").joinpath("nvidia-h200.json").read_text())[
        "ops"
    ]
    rows = [row for table in ops.values() for row in table.get("*", []) if row[1].get("PIECES", 1) > 1]
    assert rows
    for m_upper, entry in rows:
        threads = 32 * entry["num_warps"]
        room = min(2048 // threads, 65536 // (threads * entry["maxnreg"])) if "maxnreg" in entry else 1
        assert entry["ROWS"] == 1
        assert m_upper * entry["PIECES"] <= min(132 * room, rows_triton.MAX_PROGRAMS)
