"""The laws that every scheme obeys (quant/scheme.py), over shapes that hypothesis picks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from qinfer.quant import W4A16, Dense, W8A8Fp8, W8A8Fp8Block, W8A8Fp8Static, W8A8Int8, W8A16Fp8, W8A16Int8
from qinfer.testing import error_ratio

CPU = torch.device("cpu")
FOUR_BIT = [W4A16(size, symmetric) for size in (32, 64, 128) for symmetric in (True, False)]
FLOAT8 = [W8A8Fp8(), W8A8Fp8Static(), W8A8Fp8Block(), W8A16Fp8()]
SCHEMES = [Dense(), W8A8Int8(), W8A16Int8(), *FLOAT8, *FOUR_BIT]
by_label = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different size, none centred on zero."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(rows, 1, generator=generator) * 4 - 3)
    shift = torch.randn(rows, 1, generator=generator)
    return size * (torch.randn(rows, columns, generator=generator) + shift)


def width(scheme, units: int) -> int:
    """A width that the scheme can have: any for one scale a row, whole groups for 4 bits."""
    return units * scheme.group_size if isinstance(scheme, W4A16) else units * 7


def made(scheme, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """File tensors; a static scheme's are for inputs of up to 6."""
    tensors = scheme.quantize(weight, dtype=dtype)
    return scheme.with_input_range(tensors, 6.0) if isinstance(scheme, W8A8Fp8Static) else tensors


def steps(scheme, tensors, shape) -> Tensor:
    """The scale of every weight."""
    scale = tensors["weight_scale"].float()
    if isinstance(scheme, W8A8Fp8Block):
        return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return scale.expand(shape) if scale.dim() == 1 else scale.repeat_interleave(shape[1] // scale.shape[1], 1)


@by_label
@given(rows=st.integers(1, 30), units=st.integers(1, 9), dtype=dtypes, seed=st.integers(0, 999))
@settings(max_examples=15)
def test_specs_are_what_quantize_makes(scheme, rows, units, dtype, seed):
    columns = width(scheme, units)
    tensors = scheme.quantize(weights(rows, columns, seed), dtype=dtype)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (spec.shape, spec.dtype or dtype) for name, spec in scheme.specs(rows, columns).items()
    }
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@by_label
@given(rows=st.integers(1, 12), units=st.integers(1, 5), dtype=dtypes, seed=st.integers(0, 999))
@settings(max_examples=15)
def test_a_value_comes_back_within_half_a_step(scheme, rows, units, dtype, seed):
    weight = weights(rows, width(scheme, units), seed)
    tensors = scheme.quantize(weight, dtype=dtype)
    error = (scheme.dequantize(tensors) - weight).abs()
    unit = torch.finfo(dtype).eps / 2  # what rounding the scale moves the end of the range by, relatively
    if isinstance(scheme, Dense):
        assert (error <= weight.abs() * unit + 1e-7).all()
        return
    step = steps(scheme, tensors, weight.shape)
    if scheme in FLOAT8:
        # 3 bits of mantissa: half of 2^-3 relatively; below 2^-6 steps of 2^-9
        assert (error <= torch.maximum(weight.abs() * 2**-4, step * 2**-10) * 1.0001).all()
        return
    largest_code = 15 if isinstance(scheme, W4A16) else 128
    assert (error <= step * (0.5 + largest_code * unit) * 1.001).all()


@by_label
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9, 40])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)]
)
def test_matmul_is_the_product_of_what_both_sides_mean(scheme, num_tokens, dtype, bound):
    weight = weights(48, 256)
    x = (torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)
    tensors = made(scheme, weight, dtype)
    y = scheme.matmul(x, scheme.prepare(tensors, CPU, dtype))
    assert y.dtype is dtype
    seen = scheme.fake_quantize(x.float(), tensors)
    assert error_ratio(y, seen.double() @ scheme.dequantize(tensors).double().T) < bound


@by_label
@given(
    rows=st.lists(st.integers(1, 11), min_size=2, max_size=3),
    units=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@settings(max_examples=15)
def test_fusing_shards_is_quantizing_them_joined(scheme, rows, units, seed):
    weight = weights(sum(rows), width(scheme, units), seed)
    shards = [scheme.quantize(shard, dtype=torch.bfloat16) for shard in weight.split(rows)]
    fused, whole = scheme.fuse(shards), scheme.quantize(weight, dtype=torch.bfloat16)
    assert fused.keys() == whole.keys()
    if isinstance(scheme, W8A8Fp8Static | W8A8Fp8Block):  # a scale for many rows: the shards keep their own
        meant = torch.cat([scheme.dequantize(shard) for shard in shards])
        assert torch.equal(scheme.dequantize(fused), meant)
        return
    for name, tensor in whole.items():
        assert torch.equal(fused[name], tensor), name


@by_label
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_layer_computes_the_same(scheme, dtype, tmp_path):
    tensors = made(scheme, weights(32, 128), dtype)
    save_file(tensors, tmp_path / "layer.safetensors")
    loaded = load_file(tmp_path / "layer.safetensors")
    for num_tokens in (1, 30):
        x = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
        first = scheme.matmul(x, scheme.prepare(tensors, CPU, dtype))
        assert torch.equal(first, scheme.matmul(x, scheme.prepare(loaded, CPU, dtype)))


@by_label
def test_a_chosen_range_decides_the_scale(scheme):
    if isinstance(scheme, Dense):
        assert scheme.group() is None
        return
    weight = weights(8, 256).abs()
    groups = scheme.specs(8, 256)["weight_scale"].shape[-1]
    high = weight.unflatten(1, (groups, -1)).amax(-1) / 2
    half = scheme.quantize(weight, (torch.zeros_like(high), high), dtype=torch.float32)
    full = scheme.quantize(weight, (torch.zeros_like(high), high * 2), dtype=torch.float32)
    assert torch.allclose(half["weight_scale"] * 2, full["weight_scale"], rtol=1e-6)
    # values above the range end at its upper edge, which a symmetric code misses by at most half a step
    if isinstance(scheme, W8A8Fp8Static | W8A8Fp8Block):
        high = high.amax(0, keepdim=True).expand(8, -1)  # one range for all of these rows
    ceiling = high.repeat_interleave(256 // groups, dim=1) + steps(scheme, half, (8, 256)) / 2
    assert (scheme.dequantize(half) <= ceiling * 1.0001).all()


@by_label
@pytest.mark.parametrize("row", [0.0, 1e-30, 1e4])
def test_rows_of_zeros_and_of_extremes_stay_finite(scheme, row):
    weight = weights(4, 128)
    weight[1] = row
    tensors = made(scheme, weight, torch.float32)
    back = scheme.dequantize(tensors)
    assert torch.isfinite(back).all()
    # where rows share a scale a small one is lost beside the others
    shared = isinstance(scheme, W8A8Fp8Static | W8A8Fp8Block)
    assert torch.allclose(back[1], weight[1], rtol=0.08, atol=1e-3 if shared else 1e-32)
    x = torch.ones(2, 128)
    assert torch.isfinite(scheme.matmul(x, scheme.prepare(tensors, CPU, torch.float32))).all()


def test_a_static_scheme_is_unusable_until_its_inputs_are_known():
    """Q18: a checkpoint without input scales must not look whole; NaN is refused by writer and loader."""
    scheme, weight = W8A8Fp8Static(), weights(8, 64)
    tensors = scheme.quantize(weight, dtype=torch.bfloat16)
    assert tensors["input_scale"].isnan().all()
    known = scheme.with_input_range(tensors, 44.8)
    assert known["input_scale"].item() == pytest.approx(0.1, rel=2**-8)
    x = torch.tensor([[30.0, 44.0, 1000.0, -1000.0]])
    scale = known["input_scale"].item()
    assert scheme.fake_quantize(x, known)[0, 2:].tolist() == pytest.approx([448 * scale, -448 * scale])


def test_static_shards_share_the_largest_input_scale_and_keep_their_weight_scales():
    scheme = W8A8Fp8Static()
    shards = [
        scheme.with_input_range(scheme.quantize(w, dtype=torch.float32), absmax)
        for w, absmax in ((torch.ones(3, 16), 1.0), (torch.full((2, 16), 1e-6), 2.0))
    ]
    fused = scheme.fuse(shards)
    assert fused["input_scale"].tolist() == pytest.approx([2 / 448])
    prepared = scheme.prepare(fused, CPU, torch.float32)
    assert prepared["weight_scale"].tolist() == pytest.approx([1 / 448] * 3 + [1e-6 / 448] * 2)


@pytest.mark.parametrize("rows", [[256, 128, 128], [192, 64, 64], [100]])
def test_blocks_that_no_shard_fills_are_scaled_row_by_row(rows):
    scheme, columns = W8A8Fp8Block(), 320
    shards = [scheme.quantize(weights(n, columns, n), dtype=torch.float32) for n in rows]
    fused = scheme.fuse(shards)
    whole_blocks = all(n % 128 == 0 for n in rows[:-1])
    assert len(fused["weight_scale"]) == (-(-sum(rows) // 128) if whole_blocks else sum(rows))
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    y = scheme.matmul(x, scheme.prepare(fused, CPU, torch.float32))
    parts = [scheme.matmul(x, scheme.prepare(shard, CPU, torch.float32)) for shard in shards]
    assert error_ratio(y, torch.cat(parts, 1)) < 1e-6
