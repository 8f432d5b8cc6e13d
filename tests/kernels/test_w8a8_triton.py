"""The GPU kernels of 8-bit products for few tokens: in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import w8a8_fp8, w8a8_fp8_block, w8a8_fp8_block_triton, w8a8_int8, w8a8_triton
from qinfer.kernels.panels import to_panels
from qinfer.kernels.tiles import Declined
from qinfer.testing import error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
BOUND = {torch.float32: 1e-6, torch.float16: 5e-4} if DEVICE == "cpu" else {torch.float16: 4e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, generator=generator).to(DEVICE)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def tile(bm: int, swap: int, splits: int, bk: int = 128) -> dict[str, int]:
    shape = {"BM": bm, "BN": 64, "BK": bk, "SWAP": swap, "SPLITS": splits, "EARLY": int(splits > 1)}
    return {**shape, "num_warps": 4, "num_stages": 3}


# tokens that a tile does not divide, columns that neither a panel nor a split divides
CASES = (
    (1, 64, 128, tile(16, 1, 1)),
    (5, 136, 272, tile(16, 1, 1, 256)),
    (17, 72, 400, tile(16, 1, 3)),
    (40, 72, 272, tile(64, 0, 2)),
    (70, 80, 144, tile(64, 0, 1)),
)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("m", "n", "k", "entry"), CASES)
@pytest.mark.parametrize("codes_dtype", [torch.int8, E4M3])
def test_products_of_codes(codes_dtype, m, n, k, entry, dtype):
    codes, weight = random(m, k, dtype=codes_dtype), random(n, k, dtype=codes_dtype)
    scale, weight_scale, bias = random(m, 1).abs(), random(n).abs() / 1e3, random(n)
    meaning = w8a8_int8.w8a8_int8_codes if codes_dtype is torch.int8 else w8a8_fp8.w8a8_fp8_codes
    for one_scale in (scale, scale[:1].flatten()):
        for addend in (None, bias):
            given = (codes, one_scale, to_panels(weight), weight_scale, dtype, addend)
            y = w8a8_triton.multiply.run(entry, *given)
            assert y.dtype is dtype
            expected = meaning(codes, one_scale, weight, weight_scale, dtype, addend)
            assert error_ratio(y, expected) < BOUND[dtype]


@pytest.mark.parametrize(("m", "n", "k", "entry"), CASES)
def test_products_with_block_scales(m, n, k, entry):
    entry = {name: value for name, value in entry.items() if name != "BK"}
    codes, weight, bias = random(m, k, dtype=E4M3), random(n, k, dtype=E4M3), random(n)
    scale, weight_scale = random(m, -(-k // 128)).abs(), random(-(-n // 128), -(-k // 128)).abs()
    for given_scale in (scale, scale.T.contiguous().T):
        given = (codes, given_scale, to_panels(weight), weight_scale, torch.float32, bias)
        y = w8a8_fp8_block_triton.multiply.run(entry, *given)
        assert error_ratio(y, w8a8_fp8_block.w8a8_fp8_block_codes(*given)) < 1e-6


def test_parts_are_in_order_and_add_up():
    codes, weight, weight_scale = (
        random(5, 512, dtype=torch.int8),
        random(64, 512, dtype=torch.int8),
        random(64),
    )
    given = (codes, random(5, 1), to_panels(weight), weight_scale, torch.float32, None)
    parts = w8a8_triton.multiply.run(tile(16, 1, 2), *given, in_parts=True)
    assert parts.shape == (2, 5, 64)
    halves = [w8a8_int8.w8a8_int8_codes(codes[:, s], random(5, 1), weight[:, s], weight_scale, torch.float32)
              for s in (slice(256), slice(256, None))]  # fmt: skip
    assert error_ratio(parts, torch.stack(halves)) < 1e-6


def test_the_formula_never_cuts_finer_than_it_pays():
    for m in (1, 16, 33, 129, 256):
        for n in (64, 4096, 151936):
            for k in (128, 896, 14336):
                entry = w8a8_triton.formula(m, n, k)
                assert 1 <= entry["SPLITS"] <= max(1, -(-k // 256) // 4)
    assert "STAGES" in w8a8_triton.formula(257, 4096, 4096)


def test_no_tokens_and_what_is_declined():
    panels = to_panels(random(64, 256, dtype=torch.int8))
    y = w8a8_triton.multiply(
        "w8a8_int8", random(0, 256, dtype=torch.int8), random(0, 1), panels, random(64), torch.float32
    )
    assert y.shape == (0, 64)
    for n, k, weight in ((64, 200, None), (60, 256, None), (64, 256, random(64, 256, dtype=torch.int8))):
        weight = to_panels(random(n, k, dtype=torch.int8)) if weight is None else weight
        with pytest.raises(Declined, match=rf"{n}.*{k}|in rows"):
            w8a8_triton.multiply(
                "w8a8_int8", random(4, k, dtype=torch.int8), random(4, 1), weight, random(n), torch.float32
            )


def test_scales_of_groups():
    x = random(6, 400)
    x[2] = 0
    codes, scale = w8a8_fp8_block_triton.fp8_per_group(x)
    expected, expected_scale = w8a8_fp8_block.fp8_per_group(x)
    assert torch.equal(scale, expected_scale)
    assert scale.T.is_contiguous()
    assert (codes[2].float() == 0).all()
    if DEVICE == "cuda":  # the interpreter's cast to float8 is not the GPU's
        assert error_ratio(codes.float(), expected.float()) < 1e-2
