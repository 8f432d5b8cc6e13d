"""Groups of inputs that are no neighbours (act-order): the same weight in another order (case Q24)."""

import pytest
import torch
from torch import Tensor

from qinfer.errors import CheckpointError
from qinfer.model.linear import Linear
from qinfer.quant import W4A16, W4A16Ordered, scheme_from_group
from qinfer.quant.packing import pack
from qinfer.testing import error_ratio

ROWS, COLUMNS, SIZE = 48, 128, 32


def ordered_tensors(symmetric: bool, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """File tensors with groups of very different scale, and the weight that they mean, by plain indexing."""
    generator = torch.Generator().manual_seed(seed)
    g_idx = torch.randperm(COLUMNS, generator=generator) // SIZE
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 10.0**g_idx
    order = g_idx.argsort(stable=True)
    neighbours = W4A16(SIZE, symmetric)
    made = neighbours.quantize(weight[:, order], dtype=torch.float32)
    meant = torch.empty_like(weight)
    meant[:, order] = neighbours.dequantize(made)
    codes = neighbours._codes(made)
    unsorted = torch.empty_like(codes)
    unsorted[:, order] = codes
    return {**made, "weight_packed": pack(unsorted, 4), "weight_g_idx": g_idx.int()}, meant


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_q24_groups_by_index_mean_what_plain_indexing_says(symmetric: bool, rows: int) -> None:
    scheme = W4A16Ordered(SIZE, symmetric)
    tensors, meant = ordered_tensors(symmetric)
    assert tensors.keys() == scheme.specs(ROWS, COLUMNS).keys()
    assert torch.equal(scheme.dequantize(tensors), meant)
    linear = Linear([(scheme, tensors), (scheme, tensors)], device=torch.device("cpu"), dtype=torch.float32)
    x = torch.randn(rows, COLUMNS)
    assert error_ratio(linear(x), torch.cat([x @ meant.T, x @ meant.T], 1)) < 1e-6


def test_q24_orders_that_differ_or_are_no_orders_are_refused() -> None:
    scheme = W4A16Ordered(SIZE, False)
    tensors, _ = ordered_tensors(False)
    other, _ = ordered_tensors(False, seed=1)
    with pytest.raises(CheckpointError, match="group their inputs differently"):
        scheme.fuse([tensors, other])
    with pytest.raises(CheckpointError, match="does not put 32 inputs into each of 4 groups"):
        scheme.dequantize({**tensors, "weight_g_idx": torch.zeros(COLUMNS, dtype=torch.int32)})


@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_old_spellings_of_act_order(actorder: object) -> None:
    scheme = W4A16Ordered(64, True)
    group = scheme.group()
    assert group is not None
    group["weights"]["actorder"] = actorder
    assert scheme_from_group(group, "pack-quantized") == scheme
    group["weights"]["actorder"] = "weight"
    assert scheme_from_group(group, "pack-quantized") == W4A16(64, True)
