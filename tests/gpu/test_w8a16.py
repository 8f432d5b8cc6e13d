"""Products with 8-bit weights on a GPU: every code exact, around every tile's edge, again and again."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import w8a16_fp8, w8a16_fp8_triton, w8a16_int8, w8a16_int8_triton, w8a16_triton
from qinfer.kernels.panels import to_fragments
from qinfer.kernels.tiles import Declined
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257, 512, 1000, 4097)
SHAPES = ((896, 896), (4864, 136), (1152, 8960), (136, 11008), (4096, 4096))
DTYPES = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
OPS = {
    "int8": (w8a16_int8_triton.w8a16_int8, w8a16_int8.w8a16_int8),
    "fp8": (w8a16_fp8_triton.w8a16_fp8, w8a16_fp8.w8a16_fp8),
}
kinds = pytest.mark.parametrize("kind", OPS)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What is allocated next holds NaN where nothing is written."""
    torch.full((1 << 27,), math.nan, device="cuda")


def codes_of(kind: str, *shape: int) -> Tensor:
    if kind == "int8":
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_exact(kind, dtype):
    """One-hot activations read the weight: all 256 codes (but float8's NaN) in all places of a fragment."""
    codes = torch.arange(256, device="cuda")[:, None] + torch.arange(128, device="cuda")
    codes = (codes % 256).to(torch.uint8)
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0
    codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    y = OPS[kind][0](
        torch.eye(128, device="cuda", dtype=dtype), to_fragments(codes), torch.ones(256, device="cuda")
    )
    assert torch.equal(y.T.float(), codes.float())
    wide = w8a16_triton.widened(
        to_fragments(codes), torch.ones(256, device="cuda"), dtype, 128, kind == "fp8"
    )
    assert torch.equal(wide.float(), codes.float())


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products(kind, dtype, n, k):
    weight = codes_of(kind, n, k)
    scale = (torch.rand(n, device="cuda") * 0.01 + 1e-3).to(dtype)
    fragments, bias = to_fragments(weight), torch.randn(n, device="cuda").to(dtype)
    for m in TOKENS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        exact = (x.double() @ weight.double().T) * scale.double() + bias.double()
        y = OPS[kind][0](x, fragments, scale, bias)
        assert error_ratio(y, exact) < DTYPES[dtype] * (1.5 if m > 2048 else 1), m
        assert torch.equal(y, OPS[kind][0](x, fragments, scale, bias)), m


@kinds
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)])
def test_every_row_of_the_table(kind, n, k):
    """Both ends of each row's range of tokens."""
    weight, scale = codes_of(kind, n, k), torch.rand(n, device="cuda") * 0.01 + 1e-3
    fragments, bias = to_fragments(weight), torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 2048):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        exact = (x.double() @ weight.double().T) * scale.double() + bias.double()
        y = OPS[kind][0](x, fragments, scale, bias)
        assert error_ratio(y, exact) < DTYPES[torch.bfloat16], m
        assert all(torch.equal(y, OPS[kind][0](x, fragments, scale, bias)) for _ in range(3)), m


FEW = [{"BM": 8, "BN": 64, "BK": bk, "num_warps": 2, "num_stages": 4} for bk in (128, 256)]
BY_WARPS = [
    {"BY_WARPS": 1, "BM": bm, "BN": bn, "STAGES": stages}
    for bm, bn, stages in (
        *((16, 256, 6), (32, 256, 5), (64, 256, 4), (128, 256, 3)),
        *((32, 128, 5), (64, 128, 4), (128, 128, 4), (128, 192, 3)),
    )
]


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [*FEW, *BY_WARPS], ids=str)
def test_other_kernels(kind, dtype, tile):
    """Rows, tokens and inputs that fill no tile, in one part and in three."""
    n, k = 272, 1928
    weight, scale = codes_of(kind, n, k), torch.rand(n, device="cuda") * 0.01 + 1e-3
    fragments, bias = to_fragments(weight), torch.randn(n, device="cuda").to(dtype)
    for m in (1, tile["BM"] - 1, 2 * tile["BM"] + 1):
        x = torch.randn(m, k, device="cuda").to(dtype)
        exact = (x.double() @ weight.double().T) * scale.double() + bias.double()
        for splits in (1, 3):
            entry = tile | {"SPLITS": splits, "EARLY": 1}
            y = w8a16_triton.run(entry, x, fragments, scale, bias, kind == "fp8")
            assert error_ratio(y, exact) < DTYPES[dtype], (m, splits)
            for _ in range(3):
                assert torch.equal(y, w8a16_triton.run(entry, x, fragments, scale, bias, kind == "fp8"))


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bm", "stages", "groups"), [(8, 3, 4), (16, 4, 4), (32, 3, 4), (64, 1, 4), (64, 3, 2)]
)
def test_by_quarters(kind, dtype, bm, stages, groups):
    """Rows, tokens and inputs that fill no tile and no four steps; fewer inputs than that; the same bits."""
    for n, k in ((272, 1928), (4096, 4096), (136, 128)):
        weight, scale = codes_of(kind, n, k), torch.rand(n, device="cuda") * 0.01 + 1e-3
        fragments = to_fragments(weight)
        entry = {"QUARTERS": 1, "GROUPS": groups, "BM": bm, "STAGES": stages, "EARLY": 1}
        for m in (1, bm - 1, 2 * bm + 1):
            x = torch.randn(m, k, device="cuda").to(dtype)
            product = (x.double() @ weight.double().T) * scale.double()
            for bias in (None, torch.randn(n, device="cuda").to(dtype)):
                given = (entry, x, fragments, scale, bias, kind == "fp8")
                y = w8a16_triton.run(*given)
                exact = product if bias is None else product + bias.double()
                assert error_ratio(y, exact) < DTYPES[dtype], (n, k, m)
                assert all(torch.equal(y, w8a16_triton.run(*given)) for _ in range(3)), (n, k, m)


@kinds
@pytest.mark.parametrize("m", [100, 128, 250, 900])
def test_right_every_time(kind, m):
    """The operand in registers must not change under the tensor cores' hands, however long they take."""
    n, k = 4096, 4096
    fragments = [to_fragments(codes_of(kind, n, k)) for _ in range(6)]
    scale = torch.rand(n, device="cuda") * 0.01 + 1e-3
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    first = [OPS[kind][0](x, words, scale) for words in fragments]
    for y, words in zip(first, fragments, strict=True):
        assert error_ratio(y, OPS[kind][1](x, words, scale)) < 3e-3
    for _ in range(50):
        for y, words in zip(first, fragments, strict=True):
            assert torch.equal(OPS[kind][0](x, words, scale), y)


@kinds
def test_rows_of_x_may_lie_apart(kind):
    weight, scale = codes_of(kind, 896, 512), torch.ones(896, device="cuda")
    x = torch.randn(20, 1024, device="cuda", dtype=torch.bfloat16)[:, 512:]
    y = OPS[kind][0](x, to_fragments(weight), scale)
    assert torch.equal(y, OPS[kind][0](x.contiguous(), to_fragments(weight), scale))
    assert error_ratio(y, OPS[kind][1](x, to_fragments(weight), scale)) < 3e-3


def test_parts_add_up():
    weight, scale = codes_of("int8", 4096, 14336), torch.rand(4096, device="cuda")
    x = torch.randn(16, 14336, device="cuda", dtype=torch.bfloat16)
    parts = w8a16_int8_triton.w8a16_int8_parts(x, to_fragments(weight), scale)
    assert parts.dim() == 3
    assert error_ratio(parts.sum(0), (x.double() @ weight.double().T) * scale) < 1e-5


@kinds
def test_in_a_graph(kind):
    weight, scale = codes_of(kind, 4096, 4096), torch.rand(4096, device="cuda")
    fragments, x = to_fragments(weight), torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    OPS[kind][0](x, fragments, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS[kind][0](x, fragments, scale)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert error_ratio(y, (x.double() @ weight.double().T) * scale) < 3e-3


@pytest.mark.large_gpu_memory
def test_weights_past_two_to_the_31():
    n, k = 540_672, 4096
    words = torch.randint(-(2**31), 2**31 - 1, (k // 128, n, 32), dtype=torch.int32, device="cuda")
    x, scale = torch.randn(5, k, device="cuda", dtype=torch.bfloat16), torch.rand(n, device="cuda")
    y = w8a16_int8_triton.w8a16_int8(x, words, scale)
    last = w8a16_int8.w8a16_int8(x, words[:, -256:].contiguous(), scale[-256:])
    assert error_ratio(y[:, -256:], last) < 3e-3


def test_no_tokens_and_what_is_declined():
    fragments, scale = to_fragments(codes_of("int8", 64, 256)), torch.ones(64, device="cuda")
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    assert w8a16_int8_triton.w8a16_int8(x[:0], fragments, scale).shape == (0, 64)
    for given, weight in (
        (x.float(), fragments),
        (x, codes_of("int8", 64, 256)),  # in rows
        (x[:, :100].contiguous(), to_fragments(codes_of("int8", 64, 100))),
    ):
        with pytest.raises(Declined):
            w8a16_int8_triton.w8a16_int8(given, weight, scale)
