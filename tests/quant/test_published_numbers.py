"""Scales, zero points and codes against compressed-tensors' own quantizer, for the same arguments."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

from qinfer.quant import W4A16, W8A8Fp8, W8A8Int8, W8A16Int8
from qinfer.quant.packing import unpack, unpack_zero_points

SCHEMES = [W8A8Int8(), W8A16Int8(), W8A8Fp8(), W4A16(32, True), W4A16(64, False), W4A16(128, False)]
by_label = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)


def example(rows=24, columns=256):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator) + torch.randn(rows, 1, generator=generator)
    weight[0] = weight[0].abs()  # a row on one side of zero
    return weight


def codes_and_zero_points(tensors, rows, columns):
    """What lies in the file, unpacked: codes and zero points (None where symmetric)."""
    if "weight" in tensors:
        return tensors["weight"], None
    num_bits = 32 * tensors["weight_packed"].shape[1] // columns
    codes = unpack(tensors["weight_packed"], num_bits, columns)
    packed = tensors.get("weight_zero_point")
    return codes, None if packed is None else unpack_zero_points(packed, num_bits, rows)


@by_label
def test_scales_and_zero_points_in_float32(scheme):
    weight = example()
    tensors = scheme.quantize(weight, dtype=torch.float32)
    args = QuantizationArgs(**scheme.group()["weights"])
    groups = tensors["weight_scale"].shape[1]
    low, high = torch.aminmax(weight.unflatten(1, (groups, -1)), dim=-1)
    scale, zero_point = calculate_qparams(low, high, args)
    assert torch.equal(tensors["weight_scale"], scale)
    _, ours = codes_and_zero_points(tensors, *weight.shape)
    assert ours is None or torch.equal(ours, zero_point.to(torch.int8))


@by_label
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_their_values(scheme, dtype):
    weight = example()
    tensors = scheme.quantize(weight, dtype=dtype)
    args = QuantizationArgs(**scheme.group()["weights"])
    codes, zero_point = codes_and_zero_points(tensors, *weight.shape)
    scale = tensors["weight_scale"].float()  # as stored: already rounded
    theirs = quantize(x=weight, scale=scale, zero_point=zero_point, args=args, dtype=codes.dtype)
    assert torch.equal(theirs.view(torch.int8), codes.view(torch.int8))
    values = dequantize(x_q=codes, scale=scale, zero_point=zero_point, args=args)
    assert torch.equal(scheme.dequantize(tensors), values)
