"""The GPU kernels with 8-bit weights: in Triton's interpreter where there is no GPU; the bits of `widen`."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import w8a16_fp8, w8a16_int8, w8a16_triton
from qinfer.kernels.panels import to_fragments
from qinfer.kernels.tiles import Declined
from qinfer.testing import error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
BOUND = {torch.float32: 1e-6, torch.float16: 5e-4} if DEVICE == "cpu" else {torch.float16: 5e-4}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, generator=generator).to(DEVICE)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def tile(bm: int, bk: int, splits: int) -> dict[str, int]:
    shape = {"BM": bm, "BN": 64, "BK": bk, "SPLITS": splits, "EARLY": int(splits > 1)}
    return {**shape, "num_warps": 4, "num_stages": 3}


CASES = (
    (1, 64, 128, tile(16, 128, 1)),
    (5, 136, 264, tile(16, 64, 1)),
    (17, 72, 392, tile(16, 128, 3)),
    (40, 72, 264, tile(32, 256, 1)),
    (70, 80, 136, tile(64, 64, 2)),
    (5, 136, 264, tile(8, 128, 1)),
    (9, 72, 512, tile(8, 256, 2)),
)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("m", "n", "k", "entry"), CASES)
@pytest.mark.parametrize("codes", [torch.int8, E4M3])
def test_products(codes, m, n, k, entry, dtype):
    x, weight, scale = random(m, k, dtype=dtype), random(n, k, dtype=codes), random(n).abs()
    meaning = w8a16_int8.w8a16_int8 if codes is torch.int8 else w8a16_fp8.w8a16_fp8
    fragments = to_fragments(weight)
    for bias in (None, random(n)):
        y = w8a16_triton.run(entry, x, fragments, scale, bias, fp8=codes is E4M3)
        assert y.dtype is dtype
        assert error_ratio(y, meaning(x, weight, scale, bias)) < BOUND[dtype]
        assert torch.equal(meaning(x, fragments, scale, bias), meaning(x, weight, scale, bias))


@pytest.mark.parametrize("codes", [torch.int8, E4M3])
def test_widened(codes):
    weight, scale = random(40, 200, dtype=codes), random(40)
    wide = w8a16_triton.widened(to_fragments(weight), scale, torch.float16, 200, codes is E4M3)
    assert torch.equal(wide, (weight.float() * scale[:, None]).half())
    y = w8a16_triton.run({"WIDEN": 1}, random(3, 200, dtype=torch.float16), to_fragments(weight), scale, None,
                         fp8=codes is E4M3)  # fmt: skip
    assert error_ratio(y, random(3, 200, dtype=torch.float16).double() @ wide.double().T) < 1e-3


def halves(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The 16-bit numbers with these bits."""
    return torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(dtype)


def test_the_bits_of_widen():
    """What the kernel's four instruction sequences do to a code in the low byte, done here in torch."""
    code = torch.arange(256)
    integers = code.to(torch.uint8).view(torch.int8).float()
    low = halves((code & 0x7F) | 0x4300, torch.bfloat16) - halves((code & 0x80) ^ 0x4300, torch.bfloat16)
    assert torch.equal(low.float(), integers)
    assert torch.equal((halves((code ^ 0x80) | 0x6400, torch.float16) - 1152).float(), integers)
    floats = code.to(torch.uint8).view(E4M3).float()
    numbers = ~floats.isnan()
    high = code << 8
    moved = halves(((high & 0x7F00) >> 4) | (high & 0x8000), torch.bfloat16).float() * 2.0**120
    assert torch.equal(moved[numbers], floats[numbers])
    assert halves(torch.tensor([0x7B80]), torch.bfloat16).float().item() == 2.0**120
    moved = halves(((high & 0x7F00) >> 1) | (high & 0x8000), torch.float16).float() * 256
    assert torch.equal(moved[numbers], floats[numbers])


def test_no_tokens_and_what_is_declined():
    fragments, scale = to_fragments(random(64, 256, dtype=torch.int8)), random(64)
    assert w8a16_triton.multiply("w8a16_int8", random(0, 256), fragments, scale, None, False).shape == (0, 64)
    for x, weight in (
        (random(4, 100, dtype=torch.float16), to_fragments(random(64, 100, dtype=torch.int8))),
        (random(4, 256, dtype=torch.float16), random(64, 256, dtype=torch.int8)),
        (random(4, 256, dtype=torch.float16), to_fragments(random(60, 256, dtype=torch.int8))),
    ):
        with pytest.raises(Declined):
            w8a16_triton.multiply("w8a16_int8", x, weight, scale, None, False)
