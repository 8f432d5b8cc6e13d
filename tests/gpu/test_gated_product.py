"""The gated product on a GPU: around tiles' edges, against float64, as layers use it, in memory of NaN."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import gated_product, gated_product_triton, w8a8_triton
from qinfer.kernels.gated_product import TURN
from qinfer.kernels.panels import to_panels
from qinfer.model.linear import Linear
from qinfer.quant.dense import Dense
from qinfer.quant.w8a8_fp8 import W8A8Fp8
from qinfer.quant.w8a8_int8 import W8A8Int8
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
TOKENS = (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 255, 257, 512, 1000, 4097)
SHAPES = ((64, 128), (192, 896), (4864, 896), (1536, 2064), (14336, 4096))  # inner, columns
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LIMIT = 6e-3  # of float8 sums, which have about 14 bits
KINDS = (
    {"BM": 128, "BN": 128, "STAGES": 6, "GROUP": 2, "SPLITS": 1, "EARLY": 1, "num_warps": 4},
    {"BM": 128, "BN": 256, "STAGES": 4, "GROUP": 16, "SPLITS": 1, "EARLY": 1, "num_warps": 4},
    {"BM": 256, "BN": 128, "STAGES": 3, "GROUP": 8, "SPLITS": 1, "EARLY": 0, "num_warps": 4},
)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What is allocated next holds NaN where nothing is written."""
    torch.full((1 << 27,), math.nan, device="cuda")


def inputs(kind: torch.dtype, m: int, inner: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def codes(*shape: int) -> Tensor:
        if kind is torch.int8:
            return torch.randint(-128, 128, shape, dtype=kind, device="cuda")
        return torch.randn(*shape, device="cuda").to(kind)

    small = (4e-4 if kind is torch.int8 else 2.0) / math.sqrt(k)
    scale = torch.rand(m, 1, device="cuda") + 0.5
    weight_scale = (torch.rand(2 * inner, device="cuda") + 0.5) * small
    return codes(m, k), scale, codes(2 * inner, k), weight_scale


def exact(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, *, gelu: bool) -> Tensor:
    both = (codes.double() @ weight.double().T * weight_scale * scale).view(len(codes), -1, 2, TURN)
    gate, up = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
    if gelu:
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + torch.exp(-gate)) * up


def check_codes(values: Tensor, scale: Tensor, expected: Tensor) -> None:
    """The nearest codes of numbers that were rounded to bfloat16; of e4m3, as near as all are together."""
    off = (values.double() * scale.double() - expected).abs()
    if values.dtype is torch.int8:
        assert bool((off <= 0.51 * scale.double() + 0.01 * expected.abs()).all())
    assert error_ratio(values.double() * scale.double(), expected) < 0.04


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("kind", [torch.int8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize(("inner", "k"), SHAPES)
def test_against_float64(inner, k, kind, gelu) -> None:
    for m in TOKENS:
        codes, scale, weight, weight_scale = inputs(kind, m, inner, k)
        expected = exact(codes, scale, weight, weight_scale, gelu=gelu)
        given = codes, scale, to_panels(weight), weight_scale
        for dtype in DTYPES:
            y = gated_product_triton.gated(*given, dtype, gelu=gelu)
            assert y.dtype is dtype
            assert error_ratio(y, expected) < LIMIT, m
            assert torch.equal(y, gated_product_triton.gated(*given, dtype, gelu=gelu)), m
        to_codes = (
            gated_product_triton.gated_to_int8 if kind is torch.int8 else gated_product_triton.gated_to_fp8
        )
        values, out_scale = to_codes(*given, torch.bfloat16, gelu=gelu)
        assert values.dtype is kind
        largest = expected.abs().amax(1, keepdim=True) / (127 if kind is torch.int8 else 448)
        assert error_ratio(out_scale, largest) < LIMIT, m
        check_codes(values, out_scale, expected)


@pytest.mark.parametrize("kind", [torch.int8, E4M3], ids=["int8", "fp8"])
@pytest.mark.parametrize("entry", KINDS, ids=str)
def test_every_kind_of_tile(entry, kind) -> None:
    for inner, k in ((64, 128), (192, 272), (448, 2064), (1024, 1024)):
        for m in (1, 63, 130, 257, 600):
            codes, scale, weight, weight_scale = inputs(kind, m, inner, k)
            given = codes, scale, to_panels(weight), weight_scale, torch.bfloat16, None
            for gate in ("silu", "gelu"):
                y = w8a8_triton.multiply.run(entry, *given, gate=gate)
                expected = exact(codes, scale, weight, weight_scale, gelu=gate == "gelu")
                assert error_ratio(y, expected) < LIMIT, (inner, k, m)
                assert torch.equal(y, w8a8_triton.multiply.run(entry, *given, gate=gate))


def test_a_row_of_nan_stays_alone() -> None:
    codes, scale, weight, weight_scale = inputs(E4M3, 300, 192, 896)
    scale[7] = math.nan
    y = gated_product_triton.gated(codes, scale, to_panels(weight), weight_scale, torch.bfloat16, gelu=False)
    assert y[7].isnan().all()
    assert y[:7].isfinite().all()
    assert y[8:].isfinite().all()


@pytest.mark.parametrize("kind", [torch.int8, E4M3], ids=["int8", "fp8"])
def test_large_gates_close_and_open(kind) -> None:
    """Gates beyond what exp holds: 0 or the gate itself, never NaN."""
    codes, scale, weight, weight_scale = inputs(kind, 300, 192, 896)
    weight_scale *= 500
    expected = exact(codes, scale, weight, weight_scale, gelu=False)
    for gelu in (False, True):
        y = gated_product_triton.gated(
            codes, scale, to_panels(weight), weight_scale, torch.bfloat16, gelu=gelu
        )
        assert error_ratio(y, expected) < LIMIT


@pytest.mark.parametrize("m", [1, 40, 700])
@pytest.mark.parametrize("scheme", [W8A8Int8(), W8A8Fp8()], ids=lambda scheme: scheme.name)
def test_a_linear_in_turns(scheme, m) -> None:
    """What a layer does with gate and up is the same as of two linears apart, for every kind of `down`."""
    torch.manual_seed(0)
    device, dtype = torch.device("cuda"), torch.bfloat16
    shards = [(scheme, scheme.quantize(torch.randn(1536, 576) / 24, dtype=dtype)) for _ in range(2)]
    linear = Linear.of_gate_and_up(shards, device=device, dtype=dtype)
    assert linear.turn == TURN
    x = torch.randn(m, 576, device=device, dtype=dtype)
    gate, up = (Linear([shard], device=device, dtype=dtype)(x).double() for shard in shards)
    expected = gate / (1 + torch.exp(-gate)) * up
    plain = linear.gated(x, False, None)
    assert error_ratio(plain, expected) < 1e-2
    for codes in (torch.int8, E4M3):
        coded = linear.gated(x, False, codes)
        assert coded.values.dtype is codes
        check_codes(coded.values, coded.scale, expected)


def test_what_stays_as_it_is() -> None:
    """Without 8-bit inputs, with a bias, or where turns do not come out even, all of the gate comes first."""
    device, dtype, scheme = torch.device("cuda"), torch.bfloat16, W8A8Int8()

    def turn(scheme, inner: int, bias: Tensor | None = None) -> int | None:
        shards = [(scheme, scheme.quantize(torch.randn(inner, 256), dtype=dtype)) for _ in range(2)]
        return Linear.of_gate_and_up(shards, bias, device=device, dtype=dtype).turn

    assert turn(scheme, 192) == TURN
    assert turn(scheme, 96) is None
    assert turn(Dense(), 192) is None
    assert turn(scheme, 192, torch.zeros(384, device=device, dtype=dtype)) is None


@pytest.mark.parametrize("m", [3, 200, 400])
def test_the_meaning_takes_panels(m) -> None:
    """As QINFER_CHECK compares them."""
    for kind in (torch.int8, E4M3):
        codes, scale, weight, weight_scale = inputs(kind, m, 192, 896)
        given = codes, scale, to_panels(weight), weight_scale, torch.bfloat16
        meaning = gated_product.gated(*given, gelu=False)
        assert error_ratio(gated_product_triton.gated(*given, gelu=False), meaning) < 1e-2
