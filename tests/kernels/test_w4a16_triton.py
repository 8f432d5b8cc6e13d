"""The 4-bit product's kernel in Triton's interpreter, and how its work is cut."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import w4a16, w4a16_triton
from qinfer.kernels.tiles import Declined
from qinfer.kernels.w4a16_plan import formula, plan
from qinfer.testing import error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# weights rounded to float16, and one rounding of the result
BOUND = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
BASE = {
    "BM": 16,
    "BN": 64,
    "MODE": 1,
    "UNROLL": 1,
    "WARPS": 4,
    "STAGES": 2,
    "REGISTERS": 0,
    "TMA": 0,
    "AHEAD": 0,
    "EARLY": 0,
}
WHOLE = {"SLOTS": 1, "PIECES": 0}
dtypes = pytest.mark.parametrize("dtype", BOUND)


def make_weight(n: int, k: int, group: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.randn(n, k // group, device=DEVICE).to(dtype)
    return codes, scale, torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=DEVICE)


def check(tile: dict[str, int], m: int, n: int, k: int, group: int, dtype: torch.dtype) -> Tensor:
    """The product by a tile, which must be that of float64."""
    weight = make_weight(n, k, group, dtype)
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    wide = torch.float32 if w4a16_triton.INTERPRET else dtype
    out = torch.full((m, n), float("nan"), dtype=wide, device=DEVICE)
    # a scale for each row is one group of whole tiles to the kernel
    padded = -(-k // w4a16.INPUTS) * w4a16.INPUTS if group == k else group
    w4a16_triton.launch(BASE | WHOLE | tile, padded, x, out=out, **w4a16.pack_fragments(*weight))
    expected = x.double() @ w4a16.dequantize_w4(*weight).double().T
    assert error_ratio(out, expected) < BOUND[dtype]
    return out


@dtypes
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("bm", [8, 16])
def test_scales_in_the_weight_and_on_the_sums(bm: int, mode: int, dtype: torch.dtype) -> None:
    check({"BM": bm, "MODE": mode}, 5, 72, 384, 128, dtype)


@dtypes
@pytest.mark.parametrize(("group", "k"), [(32, 160), (64, 320), (256, 512), (200, 200)])
def test_groups(group: int, k: int, dtype: torch.dtype) -> None:
    check({"BM": 8}, 3, 40, k, group, dtype)
    check({"BM": 16}, 17, 40, k, group, dtype)


@pytest.mark.parametrize("pieces", [5, 11, 100])
@pytest.mark.parametrize("slots", [3, 100])
def test_pieces_add_up(slots: int, pieces: int) -> None:
    """Some of the four tiles whole and some in pieces, or all in pieces, as many as there are steps."""
    check({"SLOTS": slots, "PIECES": pieces}, 18, 72, 384, 128, torch.float16)


@pytest.mark.parametrize("k", [128, 256, 320, 640])
def test_two_tiles_of_inputs_a_step(k: int) -> None:
    check({"UNROLL": 2, "SLOTS": 9, "PIECES": 3}, 3, 72, k, 64, torch.float16)


@dtypes
def test_tokens_by_descriptor(dtype: torch.dtype) -> None:
    check({"TMA": 1, "MODE": 0, "UNROLL": 2}, 20, 72, 320, 64, dtype)


def test_a_scale_per_row_without_any_padding() -> None:
    """One group and whole tiles: nothing of `scale_zero` is padded, and its stride says nothing."""
    weight = make_weight(128, 128, 128, torch.float16)
    x = torch.randn(3, 128, device=DEVICE).half()
    out = w4a16_triton.w4a16_fragments(x, **w4a16.pack_fragments(*weight))
    assert error_ratio(out, w4a16.w4a16(x.float(), *weight)) < BOUND[torch.float16]


def test_wide_tiles_shrink_where_the_weight_is_not_padded_to_them() -> None:
    assert plan(BASE | WHOLE | {"BN": 256}, 1, 300, 128).rows == 128
    check({"BN": 256}, 2, 300, 128, 128, torch.float16)
    check({"BN": 256}, 2, 250, 128, 128, torch.float16)


@dtypes
def test_the_op_takes_any_number_of_tokens(dtype: torch.dtype) -> None:
    weight = make_weight(24, 192, 64, dtype)
    packed = w4a16.pack_fragments(*weight)
    for m in (0, 1, 9, 40):
        x = torch.randn(m, 192, device=DEVICE).to(dtype)
        out = w4a16_triton.w4a16_fragments(x, **packed)
        assert out.dtype == dtype
        assert out.shape == (m, 24)
        assert m == 0 or error_ratio(out, w4a16.w4a16(x.float(), *weight)) < BOUND[dtype]


def test_rows_of_a_wider_tensor() -> None:
    weight = make_weight(24, 192, 64, torch.float16)
    packed = w4a16.pack_fragments(*weight)
    wide = torch.randn(3, 400, device=DEVICE).half()
    for view in (wide[:, 8:200], wide[:, 1:193], wide.T[:192].T):
        expected = w4a16.w4a16(view.float(), *weight)
        assert error_ratio(w4a16_triton.w4a16_fragments(view, **packed), expected) < BOUND[torch.float16]


@dtypes
@pytest.mark.parametrize(("group", "k"), [(64, 192), (128, 256), (96, 96), (128, 128)])
def test_unpacking(group: int, k: int, dtype: torch.dtype) -> None:
    weight = make_weight(72, k, group, dtype)
    wide = w4a16_triton.dequantize(**w4a16.pack_fragments(*weight), inputs=k, dtype=dtype)
    assert wide.dtype == dtype
    torch.testing.assert_close(wide, w4a16.dequantize_w4(*weight).to(dtype), rtol=2**-7, atol=0)


def test_what_is_declined_says_why() -> None:
    x = torch.zeros(1, 384, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(Declined, match="groups of 192"):
        w4a16_triton.w4a16_fragments(x, **w4a16.pack_fragments(*make_weight(8, 384, 192, torch.bfloat16)))
    packed = w4a16.pack_fragments(*make_weight(8, 384, 128, torch.bfloat16))
    with pytest.raises(Declined, match="padding"):
        w4a16_triton.w4a16_fragments(x, packed["words"], packed["scale_zero"].clone())
    with pytest.raises(Declined, match="float32"):
        w4a16_triton.w4a16_fragments(x.float(), **packed)
    with pytest.raises(Declined, match="tiles of output"):
        plan(BASE | WHOLE, 1 << 31, 128 << 10, 1 << 15)


@given(st.integers(1, 5000), st.integers(1, 200_000), st.integers(1, 200), st.integers(1, 200))
@settings(max_examples=100)
def test_the_formula_fits_any_shape(m, n, tiles_of_inputs, cores):
    config = formula(m, n, 32 * tiles_of_inputs, cores)
    if "DEQUANTIZE" in config:
        assert m > 1024
        return
    how = plan(config, m, n, 32 * tiles_of_inputs)
    assert how.cut.programs >= 1
    assert config["BM"] >= min(m, 8)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_equally_cut_tiles_are_in_order_and_add_up(parts: int) -> None:
    """Two tiles of rows by two of tokens, not full, over four steps."""
    m, n, k = 21, 104, 512
    weight, x = make_weight(n, k, 128, torch.float16), torch.randn(21, k, device=DEVICE).half()
    tile = BASE | {"SLOTS": 100, "PIECES": 4 * parts}
    assert plan(tile, m, n, k).equal_parts(n) == parts
    out = torch.full((parts, m, n), float("nan"), device=DEVICE)
    w4a16_triton.launch(tile, 128, x, out=out, **w4a16.pack_fragments(*weight))
    wide = w4a16.dequantize_w4(*weight).double()
    for part, columns in zip(out, torch.arange(k, device=DEVICE).chunk(parts), strict=True):
        assert error_ratio(part, x[:, columns].double() @ wide[:, columns].T) < 1e-3


@pytest.mark.parametrize("pieces", [4, 6, 9, 12])
def test_whole_tiles_and_unequal_pieces_are_not_parts(pieces: int) -> None:
    assert plan(BASE | {"SLOTS": 100, "PIECES": pieces}, 21, 104, 512).equal_parts(104) == 0
