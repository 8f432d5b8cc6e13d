"""Packed words against compressed-tensors' own packer, bit for bit, and the round trip."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.quant.packing import pack, pack_zero_points, packed_length, unpack, unpack_zero_points


def random_codes(rows: int, columns: int, num_bits: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (num_bits - 1)
    return torch.randint(-half, half, (rows, columns), dtype=torch.int8, generator=generator)


shapes = st.tuples(st.integers(1, 20), st.integers(1, 70), st.sampled_from([4, 8]), st.integers(0, 2**31))


@given(shapes)
@settings(max_examples=60)
def test_words_are_those_of_compressed_tensors_and_come_back(shape):
    rows, columns, num_bits, seed = shape
    codes = random_codes(rows, columns, num_bits, seed)
    packed = pack(codes, num_bits)
    assert packed.shape == (rows, packed_length(columns, num_bits))
    assert torch.equal(packed, pack_to_int32(codes, num_bits))
    assert torch.equal(unpack(packed, num_bits, columns), codes)
    assert torch.equal(unpack_from_int32(packed, num_bits, codes.shape), codes)


@given(shapes)
@settings(max_examples=60)
def test_zero_points_are_packed_down_the_rows(shape):
    rows, groups, num_bits, seed = shape
    zero_points = random_codes(rows, groups, num_bits, seed)
    packed = pack_zero_points(zero_points, num_bits)
    assert packed.shape == (packed_length(rows, num_bits), groups)
    assert torch.equal(packed, pack_to_int32(zero_points, num_bits, packed_dim=0))
    assert torch.equal(unpack_zero_points(packed, num_bits, rows), zero_points)


@pytest.mark.parametrize(
    ("codes", "num_bits", "word"),
    [
        ([-8, -7, -6, -5, -4, -3, -2, 7], 4, 0xF6543210),  # first code in the lowest nibble; top bit set
        ([-7], 4, 0x00000001),  # the rest of the word is zero bits
        ([-128, 127, 0, -127], 8, 0x0180FF00),
    ],
)
def test_a_word_drawn_by_hand(codes, num_bits, word):
    packed = pack(torch.tensor([codes], dtype=torch.int8), num_bits)
    assert packed.item() & 0xFFFFFFFF == word
