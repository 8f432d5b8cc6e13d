"""Products of 8-bit codes on a GPU: around every tile's edge, exact for int8, and where sizes pass 2^31."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import w8a8_fp8, w8a8_fp8_triton, w8a8_int8, w8a8_int8_triton, w8a8_triton
from qinfer.kernels.panels import to_panels
from qinfer.kernels.tiles import Declined
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
TOKENS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257, 512, 1000, 4097)
# no multiples of a tile's 128 or 256 rows, of a step's 128 columns, of a split
SHAPES = ((896, 896), (4864, 272), (1152, 8960), (136, 11008), (4096, 4096))
DTYPES = (torch.bfloat16, torch.float16)
FAST_SUM = 6e-3  # of float8 codes, kept with about 14 bits


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What is allocated next holds NaN where nothing is written."""
    torch.full((1 << 27,), math.nan, device="cuda")


def int8_codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def fp8_codes(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(E4M3)


def scales(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda") * 0.01 + 1e-4


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_sums_are_exact(n, k):
    weight, weight_scale, bias = int8_codes(n, k), scales(n), torch.randn(n, device="cuda")
    panels = to_panels(weight)
    for m in TOKENS:
        codes, scale = int8_codes(m, k), scales(m, 1)
        exact = (codes.double() @ weight.double().T) * weight_scale * scale + bias
        for dtype in (*DTYPES, torch.float32):
            y = w8a8_int8_triton.w8a8_int8_codes(codes, scale, panels, weight_scale, dtype, bias)
            assert y.dtype is dtype
            assert error_ratio(y, exact) < {torch.float32: 1e-6, torch.float16: 4e-4}.get(dtype, 3e-3), m
            again = w8a8_int8_triton.w8a8_int8_codes(codes, scale, panels, weight_scale, dtype, bias)
            assert torch.equal(y, again), m


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_float8_sums(n, k):
    weight, weight_scale, bias = fp8_codes(n, k), scales(n), torch.randn(n, device="cuda")
    panels = to_panels(weight)
    for m in TOKENS:
        codes = fp8_codes(m, k)
        for scale in (scales(m, 1), scales(1)):
            exact = (codes.double() @ weight.double().T) * weight_scale * scale + bias
            y = w8a8_fp8_triton.w8a8_fp8_codes(codes, scale, panels, weight_scale, torch.bfloat16, bias)
            assert error_ratio(y, exact) < FAST_SUM, m
            again = w8a8_fp8_triton.w8a8_fp8_codes(codes, scale, panels, weight_scale, torch.bfloat16, bias)
            assert torch.equal(y, again), m


KINDS = (  # of kernels and tiles, whichever the table prefers today
    {"BM": 16, "BN": 128, "BK": 128, "SWAP": 1, "SPLITS": 1, "EARLY": 0, "num_warps": 4, "num_stages": 3},
    {"BM": 32, "BN": 64, "BK": 256, "SWAP": 1, "SPLITS": 3, "EARLY": 1, "num_warps": 4, "num_stages": 4},
    {"BM": 128, "BN": 128, "BK": 128, "SWAP": 0, "SPLITS": 1, "EARLY": 2, "num_warps": 4, "num_stages": 3},
    {"BM": 128, "BN": 128, "STAGES": 6, "GROUP": 2, "SPLITS": 2, "EARLY": 1, "num_warps": 4},
    {"BM": 128, "BN": 256, "STAGES": 4, "GROUP": 16, "SPLITS": 1, "EARLY": 1, "num_warps": 4},
    {"BM": 256, "BN": 128, "STAGES": 3, "GROUP": 8, "SPLITS": 1, "EARLY": 0, "num_warps": 4},
)


@pytest.mark.parametrize("entry", KINDS, ids=str)
def test_every_kind_of_tile(entry):
    for n, k in ((136, 128), (136, 272), (896, 2064), (2048, 1024)):
        weight, weight_scale, bias = int8_codes(n, k), scales(n), torch.randn(n, device="cuda")
        panels = to_panels(weight)
        for m in (1, 17, 64, 130, 600):
            for scale in (scales(m, 1), scales(1)):
                for addend in (None, bias):
                    codes = int8_codes(m, k)
                    exact = (codes.double() @ weight.double().T) * weight_scale * scale
                    given = (codes, scale, panels, weight_scale, torch.bfloat16, addend)
                    y = w8a8_triton.multiply.run(entry, *given)
                    assert error_ratio(y, exact if addend is None else exact + bias) < 3e-3, (n, k, m)
                    assert torch.equal(y, w8a8_triton.multiply.run(entry, *given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 64, 300])
def test_from_activations_as_the_meanings(m, dtype):
    n, k = 896, 1152
    x = torch.randn(m, k, device="cuda").to(dtype) * 3
    integers, floats, weight_scale = int8_codes(n, k), fp8_codes(n, k), scales(n)
    fixed = torch.tensor([0.02], device="cuda")
    for twin, meaning, weight, more in (
        (w8a8_int8_triton.w8a8_int8, w8a8_int8.w8a8_int8, integers, (weight_scale,)),
        (w8a8_fp8_triton.w8a8_fp8, w8a8_fp8.w8a8_fp8, floats, (weight_scale,)),
        (w8a8_fp8_triton.w8a8_fp8_static, w8a8_fp8.w8a8_fp8_static, floats, (weight_scale, fixed)),
    ):
        y, panels = twin(x, to_panels(weight), *more), to_panels(weight)
        assert error_ratio(y, meaning(x, weight, *more)) < 1e-2
        assert torch.equal(meaning(x, panels, *more), meaning(x, weight, *more))


def test_codes_with_one_scale():
    x = torch.randn(37, 400, device="cuda", dtype=torch.bfloat16) * 40
    x[3] = 0
    codes = w8a8_fp8_triton.fp8_static(x, torch.tensor([0.25], device="cuda"))
    expected = w8a8_fp8.fp8_static(x, torch.tensor([0.25], device="cuda"))
    assert torch.equal(codes.float(), expected.float())
    assert (codes[3].float() == 0).all()


def test_a_row_of_nan_stays_alone():
    x = torch.randn(20, 512, device="cuda", dtype=torch.bfloat16)
    x[7, 100] = math.nan
    weight, weight_scale = int8_codes(896, 512), scales(896)
    for y in (
        w8a8_int8_triton.w8a8_int8(x, to_panels(weight), weight_scale),
        w8a8_fp8_triton.w8a8_fp8(x, to_panels(fp8_codes(896, 512)), weight_scale),
    ):
        assert y[7].isnan().all()
        assert y[:7].isfinite().all()
        assert y[8:].isfinite().all()


@pytest.mark.parametrize("m", [1, 16, 128, 200])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (4096, 4096)])
def test_parts_add_up(n, k, m):
    weight, weight_scale = int8_codes(n, k), scales(n)
    codes, scale = int8_codes(m, k), scales(m, 1)
    parts = w8a8_int8_triton.w8a8_int8_parts(codes, scale, to_panels(weight), weight_scale, torch.bfloat16)
    assert parts.dim() == 3
    assert parts.dtype is torch.float32
    exact = (codes.double() @ weight.double().T) * weight_scale * scale
    assert error_ratio(parts.sum(0), exact) < 1e-6


@pytest.mark.parametrize("m", [4, 130, 600])
def test_in_a_graph(m):
    weight, weight_scale = int8_codes(4096, 4096), scales(4096)
    panels, scale = to_panels(weight), scales(m, 1)
    codes = int8_codes(m, 4096)

    def step() -> Tensor:
        return w8a8_int8_triton.w8a8_int8_codes(codes, scale, panels, weight_scale, torch.bfloat16)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        codes.copy_(int8_codes(m, 4096))
        graph.replay()
        exact = (codes.double() @ weight.double().T) * weight_scale * scale
        assert error_ratio(y, exact) < 3e-3


@pytest.mark.large_gpu_memory
def test_past_two_to_the_31():
    """Results, then weights, of more than 2^31 elements."""
    m, n, k = 80_000, 28_672, 128
    codes, scale, weight, weight_scale = int8_codes(m, k), scales(m, 1), int8_codes(n, k), scales(n)
    panels = to_panels(weight)
    y = w8a8_int8_triton.w8a8_int8_codes(codes, scale, panels, weight_scale, torch.bfloat16)
    assert y.numel() > 2**31
    exact = (codes[-300:].double() @ weight.double().T) * weight_scale * scale[-300:]
    assert error_ratio(y[-300:], exact) < 3e-3
    del y
    n, k = 540_672, 4096
    panels = torch.randint(-128, 128, (k // 128, n, 128), dtype=torch.int8, device="cuda")
    assert panels.numel() > 2**31
    for m in (5, 300):
        codes, scale, weight_scale = int8_codes(m, k), scales(m, 1), scales(n)
        y = w8a8_int8_triton.w8a8_int8_codes(codes, scale, panels, weight_scale, torch.bfloat16)
        last = panels[:, -256:].transpose(0, 1).flatten(1)
        exact = (codes.double() @ last.double().T) * weight_scale[-256:] * scale
        assert error_ratio(y[:, -256:], exact) < 3e-3


def test_no_tokens_and_what_is_declined():
    panels, weight_scale = to_panels(int8_codes(64, 256)), scales(64)
    empty = w8a8_int8_triton.w8a8_int8_codes(
        int8_codes(0, 256), scales(0, 1), panels, weight_scale, torch.bfloat16
    )
    assert empty.shape == (0, 64)
    for codes, weight in (
        (
            int8_codes(4, 200),
            to_panels(int8_codes(64, 200)),
        ),  # rows start anywhere
        (int8_codes(4, 256), to_panels(int8_codes(60, 256))),
        (int8_codes(4, 256), int8_codes(64, 256)),  # in rows
    ):
        with pytest.raises(Declined):
            w8a8_triton.multiply("w8a8_int8", codes, scales(4, 1), weight, weight_scale, torch.bfloat16)
