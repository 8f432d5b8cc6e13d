"""The layouts of 8-bit weights on a GPU: there and back, and every code where the drawing says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.kernels import panels

DTYPES = (torch.int8, torch.float8_e4m3fn)


def any_codes(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    bytes_ = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n * k))
    return bytes_.view(dtype)


@given(n=st.integers(1, 40), k=st.integers(1, 300), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_there_and_back(n, k, dtype):
    codes = any_codes(n, k, dtype)
    packed = panels.to_panels(codes)
    assert packed.shape == (-(-k // 128), n, 128)
    words = panels.to_fragments(codes)
    assert words.shape == (-(-k // 128), n, 32)
    for back in (
        panels.from_panels(packed, k),
        panels.rows_of(packed, k),
        panels.rows_of(codes, k),
        panels.from_fragments(words, k, dtype),
    ):
        assert back.dtype is dtype
        assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_every_code_lies(dtype):
    n, k = 24, 200
    codes = any_codes(n, k, dtype).view(torch.uint8)
    packed = panels.to_panels(codes.view(dtype)).view(torch.uint8)
    words = panels.to_fragments(codes.view(dtype)).view(torch.uint8).view(2, n, 2, 4, 4, 4)
    for column in range(k):
        panel, inside = divmod(column, 128)
        assert torch.equal(packed[panel, :, inside], codes[:, column])
        run, inside = divmod(inside, 64)
        s, inside = divmod(inside, 16)
        h, inside = divmod(inside, 8)
        t, p = divmod(inside, 2)
        assert torch.equal(words[panel, :, run, t, s, 2 * p + h], codes[:, column])
    assert (packed[1, :, k - 128 :] == 0).all()
