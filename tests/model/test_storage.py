"""Tensors that move to new memory stay what they are."""

import pytest
import torch

from qinfer.model.storage import Aside, rehouse, tensor_bytes, tensors_in


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_rehoused_tensors_keep_values_strides_padding_and_company(dtype: torch.dtype) -> None:
    memory = torch.arange(240, dtype=torch.float32).to(dtype)
    part, other = memory.view(12, 20)[2:9, 3:11], memory.view(12, 20).T[5:]
    alone = torch.ones(3)
    before = [(x.clone(), x.shape, x.stride(), x.storage_offset()) for x in (part, other, alone)]
    addresses = [x.data_ptr() for x in (part, other, alone)]
    rehouse([part, other, part, alone])
    for x, (value, *layout), address in zip((part, other, alone), before, addresses, strict=True):
        assert torch.equal(
            x.view(torch.uint8) if x.element_size() == 1 else x,
            value.view(torch.uint8) if x.element_size() == 1 else value,
        )
        assert [x.shape, x.stride(), x.storage_offset()] == layout
        assert x.data_ptr() != address
    assert part.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert part.untyped_storage().nbytes() == memory.nbytes  # what lies around it came along
    assert torch.equal(part.as_strided((20,), (1,), 0).float(), memory[:20].float())
    assert tensor_bytes([part, {"a": other}, (alone,)]) == memory.nbytes + alone.nbytes


def test_the_memory_behind_a_view_is_let_go() -> None:
    """A view keeps its base, and the base what it refers to, unless it moves too."""
    base = torch.zeros(8, 4, dtype=torch.int32)
    view = base.flatten(-2)
    address = base.data_ptr()
    rehouse([view])
    assert view._base is base
    assert base.data_ptr() == view.data_ptr() != address


def test_on_a_cpu_nothing_is_moved() -> None:
    made = torch.ones(4)
    assert Aside(torch.device("cpu"))(lambda: [made])[0] is made
    assert list(tensors_in({"a": [made, (made, 3)]})) == [made] * 2
