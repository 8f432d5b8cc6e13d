"""Packing of 4-bit weights into the order in which a tensor core wants them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qinfer.kernels import w4a16


def random_weight(
    rows: int, inputs: int, group: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randn(rows, inputs // group, generator=generator).to(dtype)  # negative ones too
    return codes, scale, torch.randint(0, 16, scale.shape, dtype=torch.uint8, generator=generator)


groups = st.sampled_from([32, 64, 128, 256])
dtypes = st.sampled_from([torch.bfloat16, torch.float16])


@given(st.integers(1, 150), st.integers(1, 6), groups, dtypes, st.integers(0, 2**31))
@settings(max_examples=60)
def test_packing_comes_back(rows, num_groups, group, dtype, seed):
    weight = random_weight(rows, group * num_groups, group, dtype, seed)
    packed = w4a16.pack_fragments(*weight)
    back = w4a16.unpack_fragments(**packed, inputs=group * num_groups, dtype=dtype)
    for ours, theirs in zip(back, weight, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@given(st.integers(1, 150), st.sampled_from([96, 576, 896]), dtypes, st.integers(0, 2**31))
@settings(max_examples=20)
def test_a_scale_per_row_comes_back(rows, inputs, dtype, seed):
    weight = random_weight(rows, inputs, inputs, dtype, seed)
    back = w4a16.unpack_fragments(**w4a16.pack_fragments(*weight), inputs=inputs, dtype=dtype)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, weight, strict=True))


def test_a_word_holds_one_thread_s_operands():
    """Thread t of four holds inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16; a word spans 32 inputs."""
    codes = torch.arange(128, dtype=torch.int64).expand(64, 128)  # every code names its input...
    low = w4a16.pack_fragments(w4a16.pack_nibbles((codes & 15).to(torch.uint8)), *unit(64))["words"]
    high = w4a16.pack_fragments(w4a16.pack_nibbles((codes >> 4).to(torch.uint8)), *unit(64))["words"]
    assert low.shape == (2, 1, 64, 16)  # ...in two pieces; rows are padded to two tiles
    for t in range(4):
        for block in range(4):
            word = 4 * t + block
            found = [
                int(high[0, 0, 5, word] >> 4 * i & 15) << 4 | int(low[0, 0, 5, word] >> 4 * i & 15)
                for i in range(8)
            ]
            start = 32 * block + 2 * t
            assert found == [start + s + h + p for p in (0, 1) for s in (0, 16) for h in (0, 8)]


def unit(rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, 1, dtype=torch.bfloat16), torch.zeros(rows, 1, dtype=torch.uint8)


@pytest.mark.parametrize(("dtype", "one"), [(torch.bfloat16, 0x3F80), (torch.float16, 0x3C00)])
def test_scale_and_zero_share_a_word(dtype, one):
    scale = torch.ones(1, 1, dtype=dtype)
    both = w4a16.pack_fragments(torch.zeros(1, 64, dtype=torch.uint8), scale, torch.full((1, 1), 5).byte())
    word = int(both["scale_zero"][0, 0])
    assert word & 0xFFFF == one
    magic_zero = torch.tensor([word >> 16], dtype=torch.int16).view(dtype)
    assert magic_zero.item() == w4a16.MAGIC[dtype] + 5


def test_what_is_padded_adds_nothing():
    packed = w4a16.pack_fragments(*random_weight(3, 576, 64, torch.bfloat16, 0))
    words, scale_zero = packed["words"], packed["scale_zero"]
    assert words.shape == (2, 5, 64, 16)
    assert (words[1] == 0).all()
    assert (words[0, :, 3:] == 0).all()
    assert scale_zero.shape == (9, 3)
    memory = scale_zero.as_strided((10, 128), (128, 1))
    assert (memory[9] == 0).all()
    assert (memory[:, 3:] == 0).all()


@pytest.mark.parametrize("group", [32, 64, 128, 576])
def test_the_meaning_of_fragments_is_that_of_nibbles(group):
    inputs = 576 if group != 128 else 640
    weight = random_weight(70, inputs, group, torch.bfloat16, 1)
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(w4a16.w4a16_fragments(x, **w4a16.pack_fragments(*weight)), w4a16.w4a16(x, *weight))
