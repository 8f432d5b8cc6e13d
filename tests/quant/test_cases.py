"""Bugs that others had, as cases (Q03 ... Q22): the input that showed them and what is right."""

import pytest
import torch
from torch.nn.functional import linear

from qinfer.errors import CheckpointError, UserError
from qinfer.kernels.quantize_per_token import fp8_per_token
from qinfer.model.linear import Linear
from qinfer.quant import (
    W4A16,
    Dense,
    W8A8Fp8,
    W8A8Fp8Block,
    W8A8Fp8Static,
    W8A8Int8,
    W8A16Fp8,
    W8A16Int8,
    quantize_named,
    settle_group_size,
)
from qinfer.quant.packing import unpack_zero_points
from qinfer.quant.rounding import fp8_codes, integer_codes
from qinfer.testing import error_ratio

CPU = torch.device("cpu")
FLOAT8 = [W8A8Fp8(), W8A8Fp8Static(), W8A8Fp8Block(), W8A16Fp8()]
SCHEMES = [Dense(), W8A8Int8(), W8A16Int8(), *FLOAT8, W4A16(64, True), W4A16(64, False)]
by_label = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)


def test_q03_a_zero_point_at_the_end_of_the_range_does_not_wrap():
    scheme = W4A16(32, symmetric=False)
    weight = torch.rand(8, 32, generator=torch.Generator().manual_seed(0)) + 0.5  # all positive
    tensors = scheme.quantize(weight, dtype=torch.float32)
    assert (unpack_zero_points(tensors["weight_zero_point"], 4, 8) == -8).all()  # 0 in unsigned terms
    assert (tensors["weight_zero_point"] == 0).all()
    assert scheme.dequantize(tensors).min() >= 0


def test_q06_the_zero_point_is_added_before_clamping():
    weight, scale = torch.tensor([[-0.6, 0.0, 0.9]]), torch.tensor([[0.1]])
    zero_point = torch.tensor([[6 - 8]], dtype=torch.int8)
    assert (integer_codes(weight, scale, zero_point, 4) + 8).tolist() == [[0, 6, 15]]


def test_q07_a_group_size_is_settled_for_the_whole_model():
    assert settle_group_size({"q_proj": 576, "down_proj": 1536}, 128) == 64
    assert settle_group_size({"q_proj": 4096}, 128) == 128
    assert settle_group_size({"q_proj": 4096}, 64) == 64  # never more than was asked for
    assert settle_group_size({"q_proj": 96, "down_proj": 256}, 64) == 32
    with pytest.raises(UserError, match=r"q_proj \(100\), down_proj \(50\)"):
        settle_group_size({"q_proj": 100, "down_proj": 50, "o_proj": 64}, 128)
    with pytest.raises(UserError, match="128, 64 or 32"):
        settle_group_size({"q_proj": 4096}, 96)
    with pytest.raises(UserError, match=r"q_proj.*128.*576"):
        quantize_named(W4A16(128), "q_proj.weight", torch.ones(8, 576), dtype=torch.float32)


@pytest.mark.parametrize("scheme", SCHEMES[1:], ids=lambda scheme: scheme.label)
def test_q12_a_small_shard_keeps_its_own_scale_when_fused(scheme):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (size * torch.randn(64, 256, generator=generator) for size in (1.0, 1e-6, 1.0))
    alone = scheme.quantize(k, dtype=torch.float32)
    fused = scheme.fuse([scheme.quantize(w, dtype=torch.float32) for w in (q, k, v)])
    inside = scheme.dequantize(fused)[64:128]
    assert torch.equal(inside, scheme.dequantize(alone))
    assert error_ratio(inside, k) < (0.12 if isinstance(scheme, W4A16) else 0.03)


def test_q13_float8_saturates_instead_of_turning_into_nan():
    values = torch.tensor([[448.0, 464.0, 465.0, 1000.0, -1000.0]])
    codes = fp8_codes(values, torch.ones(1, 1))
    assert codes.float().tolist() == [[448.0, 448.0, 448.0, 448.0, -448.0]]
    activations, scale = fp8_per_token(values)
    assert activations.float().abs().max() == 448
    assert scale.item() == pytest.approx(1000 / 448)


@by_label
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_q13_a_weight_that_is_not_finite_is_named(scheme, bad):
    weight = torch.ones(8, 128)
    weight[3, 5] = bad
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.3\.mlp\.up_proj\.weight: .*1 value.*NaN or inf"
    ):
        quantize_named(scheme, "model.layers.3.mlp.up_proj.weight", weight, dtype=torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES[1:], ids=lambda scheme: scheme.label)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_q15_a_scale_never_underflows_where_it_is_stored(scheme, dtype):
    assert torch.tensor(1e-8 / 7).half() == 0
    tensors = scheme.quantize(torch.full((8, 128), 1e-8), dtype=dtype)
    assert (tensors["weight_scale"] >= torch.finfo(dtype).tiny).all()
    back = scheme.dequantize(tensors)
    assert torch.isfinite(back).all()
    assert (back - 1e-8).abs().max() <= tensors["weight_scale"].float().max()
    if isinstance(scheme, W8A8Fp8Static):
        tensors = scheme.with_input_range(tensors, 1.0)
    y = scheme.matmul(torch.ones(3, 128, dtype=dtype), scheme.prepare(tensors, CPU, dtype))
    assert torch.isfinite(y).all()


def test_q16_bytes_of_float8_are_those_of_e4m3fn():
    spec = W8A8Fp8().specs(1, 3)["weight"]
    raw = torch.tensor([[0x38, 0x80, 0x7E]], dtype=torch.uint8)
    assert spec.dtype is torch.float8_e4m3fn
    values = W8A8Fp8().dequantize({"weight": raw.view(spec.dtype), "weight_scale": torch.ones(1, 1)})
    assert values.tolist() == [[1.0, 0.0, 448.0]]
    assert torch.signbit(values)[0, 1]  # 0x80 is minus zero here and NaN in e4m3fnuz


@by_label
@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q22_a_bias_is_added_once_and_unscaled(scheme, num_tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator) / 32
    x = (torch.randn(num_tokens, 128, generator=generator)).to(dtype)
    shards = [(scheme, scheme.quantize(part, dtype=dtype)) for part in weight.split((32, 16, 16))]
    if isinstance(scheme, W8A8Fp8Static):
        shards = [(scheme, scheme.with_input_range(tensors, 6.0)) for _, tensors in shards]
    layer = Linear(shards, torch.full((64,), 10.0, dtype=dtype), device=CPU, dtype=dtype)
    meant = torch.cat([scheme.dequantize(tensors) for _, tensors in shards])
    bias = layer(x).float() - linear(scheme.fake_quantize(x.float(), shards[0][1]), meant)
    assert (bias - 10).abs().max() < 10 * torch.finfo(dtype).eps
