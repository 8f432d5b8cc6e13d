"""Fast CPU products against their meaning in plain torch; int8 ones give the same integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qinfer import ops
from qinfer.kernels import (
    w4a16,
    w4a16_cpu,
    w8a8_fp8,
    w8a8_fp8_cpu,
    w8a8_int8,
    w8a8_int8_cpu,
    w8a16_int8,
    w8a16_int8_cpu,
)
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token
from qinfer.testing import error_ratio

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# what rounding the result (and for weights unpacked to the dtype, those) may cost, relative
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(7))


@dtypes
def test_codes_of_int8_activations(dtype):
    x = (normal(6, 80) * torch.tensor([[1.0], [1e-6], [300.0], [0.0], [1.0], [1.0]])).to(dtype)
    x[4] = torch.arange(-40, 40) / 2  # ties
    x[4, 0] = 127  # scale 1
    codes, scale = int8_per_token(x)
    exact = x.double() / scale.double()
    assert torch.equal(codes[4].double(), exact[4].round())  # half to even
    assert ((codes.double() - exact).abs() <= 0.5 + 1e-4).all()
    assert (codes[3] == 0).all()
    assert codes.min() >= -127  # the grid is symmetric
    moving = x.abs().amax(-1) > 0
    assert (codes.abs().amax(-1) == 127).equal(moving)
    values, same_scale = w8a8_int8_cpu.scaled(x)
    assert torch.equal(values.round(), codes.float())
    assert torch.equal(same_scale, scale)


@dtypes
def test_codes_of_float8_activations(dtype):
    x = (normal(4, 64) * torch.tensor([[1.0], [1e-6], [50.0], [0.0]])).to(dtype)
    codes, scale = fp8_per_token(x)
    back = codes.float() * scale
    assert torch.equal(codes.float().abs().amax(-1), torch.tensor([448.0, 448.0, 448.0, 0.0]))
    assert ((back - x.float()).abs() <= torch.maximum(x.float().abs() * 2**-4, scale * 2**-10) * 1.0001).all()


def test_float8_by_arithmetic_is_float8_by_cast():
    """Over every bfloat16 from 2^-40 to 448, both signs, and float32 numbers between them."""
    raw = torch.arange(0x2B80, 0x43E0 + 1, dtype=torch.int32)
    exact = (raw << 16).view(torch.float32)
    between = ((raw[:-1] << 16) + 12345).view(torch.float32)
    x = torch.cat((exact, -exact, between, -between, torch.zeros(1))).unsqueeze(0)
    for row in (x, x * 0.37, x.bfloat16()):
        codes, scale = fp8_per_token(row)
        values, same_scale = w8a8_fp8_cpu.float8_values(row)
        assert torch.equal(values, codes.float())
        assert torch.equal(same_scale, scale)


@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 70), st.integers(0, 999))
@settings(max_examples=40)
def test_int8_integers_are_exact_for_any_shape(num_tokens, outputs, inputs, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    x = torch.randint(-127, 128, (num_tokens, inputs), generator=generator).float()
    x[:, 0] = 127  # the scale is one, so the result is the integers
    y = ops.w8a8_int8(x, ops.pack_w8a8_int8(weight), torch.ones(outputs))
    assert torch.equal(y.double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_int8_extremes_do_not_saturate(num_tokens):
    weight = torch.full((64, 4096), -128, dtype=torch.int8)
    weight[1::2] = 127
    x = torch.full((num_tokens, 4096), 127.0)
    x[:, 1::2] *= -1
    x[:, :2048] = 127.0
    y = ops.w8a8_int8(x, ops.pack_w8a8_int8(weight), torch.ones(64))
    assert torch.equal(y.double(), x.double() @ weight.double().T)


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 20])
def test_int8_result_is_the_meaning(dtype, num_tokens):
    weight, scale = random_int8(48, 160), normal(48).abs()
    x = normal(num_tokens, 160).to(dtype)
    y = ops.w8a8_int8(x, ops.pack_w8a8_int8(weight), scale)
    assert y.dtype is dtype
    assert error_ratio(y, w8a8_int8.w8a8_int8(x.float(), weight, scale)) < ROUNDING[dtype]


def test_int8_rows_of_bfloat16_are_quantized_like_more_rows():
    """One row takes another product than three; the codes are the same, so only its roundings differ."""
    weight = random_int8(64, 576)
    x = normal(3, 576).bfloat16()
    codes, _ = int8_per_token(x)
    weight_scale = normal(64).abs().bfloat16().float()
    exact = (
        codes.double() @ weight.double().T * weight_scale.double() * (x.double().abs().amax(1, True) / 127)
    )
    alone = torch.cat([ops.w8a8_int8(row, weight, weight_scale) for row in x.split(1)])
    together = ops.w8a8_int8(x, weight, weight_scale)
    assert ((alone.double() - exact).abs() <= exact.abs() * 2**-6.9).all()  # two roundings of 2^-8
    assert ((together.double() - exact).abs() <= exact.abs() * 2**-7.9).all()


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(num_tokens, bad):
    weight = random_int8(32, 64)
    x = normal(num_tokens, 64)
    clean = ops.w8a8_int8(x, ops.pack_w8a8_int8(weight), torch.ones(32))
    x[-1, 3] = bad
    y = ops.w8a8_int8(x, ops.pack_w8a8_int8(weight), torch.ones(32))
    assert not torch.isfinite(y[-1]).any()
    assert torch.equal(y[:-1], clean[:-1])
    assert not torch.isfinite(w8a8_int8.w8a8_int8(x, weight, torch.ones(32))[-1]).any()


@pytest.mark.parametrize("columns", [1, 33, 1025])
def test_weight_only_int8_of_odd_columns(columns):
    """Where torch's own op read past the end."""
    weight, scale = random_int8(17, columns), (normal(17).abs() / 100).bfloat16()
    x = normal(5, columns).bfloat16()
    expected = w8a16_int8.w8a16_int8(x.float(), weight, scale.float())
    assert error_ratio(ops.w8a16_int8(x, weight, scale), expected) < ROUNDING[torch.bfloat16]


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 2, w8a16_int8_cpu.MAX_ROWS_OF_INT8_OP, 9, 40])
def test_weight_only_int8_is_the_meaning(dtype, num_tokens):
    weight, scale = random_int8(48, 192), (normal(48).abs() / 100).to(dtype)
    x = normal(num_tokens, 192).to(dtype)
    y = ops.w8a16_int8(x, weight, scale)
    assert y.dtype is dtype
    assert error_ratio(y, w8a16_int8.w8a16_int8(x.float(), weight, scale.float())) < ROUNDING[dtype]


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_float8_is_the_meaning(dtype, num_tokens):
    bound = 2 * ROUNDING[dtype]  # the sum of codes is rounded, then its product with the scales
    weight = (normal(48, 192) * 200).to(torch.float8_e4m3fn)
    weight[0] = 448  # sums of the largest codes, beyond what float16 holds
    x, scale = normal(num_tokens, 192).abs().to(dtype), normal(48).abs() / 1e4
    y = ops.w8a8_fp8(x, ops.pack_w8a8_fp8(weight, dtype), scale)
    assert y.dtype is dtype
    assert torch.isfinite(y).all()
    assert error_ratio(y, w8a8_fp8.w8a8_fp8(x.float(), weight, scale)) < bound


@dtypes
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("outputs", [48, 34])  # a multiple of 16, for torch's int4 op, and none
@pytest.mark.parametrize("num_tokens", [1, 2, w4a16_cpu.MAX_ROWS_OF_INT4_OP, 40])
def test_four_bits_are_the_meaning(dtype, group_size, outputs, num_tokens):
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (outputs, 256), dtype=torch.uint8, generator=generator)
    zero = torch.randint(0, 16, (outputs, 256 // group_size), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(zero.shape, generator=generator) + 0.1).to(dtype)
    weight = w4a16.pack_nibbles(codes)
    assert torch.equal(w4a16.unpack_nibbles(weight), codes)
    x = normal(num_tokens, 256).to(dtype)
    packed = ops.pack_w4a16(weight, scale, zero)
    assert ("int4" in packed) == (dtype is torch.bfloat16 and outputs == 48)
    y = ops.w4a16(x, packed)
    assert y.dtype is dtype
    assert error_ratio(y, w4a16.w4a16(x.float(), weight, scale, zero)) < ROUNDING[dtype]


def test_four_bits_unpacked_are_exact():
    codes = torch.randint(0, 16, (32, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    zero = torch.arange(64, dtype=torch.uint8).view(32, 2) % 16
    scale = torch.rand(32, 2, generator=torch.Generator().manual_seed(6)) + 0.1
    weight = w4a16.pack_nibbles(codes)
    by_hand = (codes.float().view(32, 2, 64) - zero.unsqueeze(-1).float()) * scale.unsqueeze(-1)
    assert torch.equal(w4a16.dequantize_w4(weight, scale, zero), by_hand.view(32, 128))
    packed = w4a16_cpu.pack(weight, scale, zero)
    assert torch.equal(
        w4a16_cpu.unpack(packed["nibbles"], packed["scale"], packed["zero"]).T, by_hand.view(32, 128)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_dense_is_the_float64_product_rounded_once(dtype, num_tokens):
    """Sums are float32 whatever the dtype: an error of a 16-bit sum would be many times its rounding."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(300, 1000, generator=generator).to(dtype)
    x = torch.randn(num_tokens, 1000, generator=generator).to(dtype)
    y = ops.dense(x, weight)
    assert y.shape == (num_tokens, 300)
    assert y.dtype is dtype
    bound = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
    assert error_ratio(y, x.double() @ weight.double().T) < bound
