"""Products with 4-bit weights on a GPU, against float64 of the same dequantized weight."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import w4a16, w4a16_triton
from qinfer.kernels.tiles import Declined
from qinfer.kernels.w4a16_plan import FORMULA, formula
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257, 512, 1000, 4097)
# rows that are no multiple of a tile, inputs whose tiles no split divides
SHAPES = ((896, 896), (1152, 896), (896, 4864), (8, 128), (200, 8960), (4096, 11008), (4104, 4096))
# Weights rounded to 16 bits, sums in float32, one rounding of the result.
BOUND = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
TABLE = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """What is allocated next holds NaN where nothing is written."""
    torch.full((1 << 27,), math.nan, device="cuda")


def make_weight(n: int, k: int, group: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(n, k // group, device="cuda") * 0.01 + 0.005).to(dtype)
    return codes, scale, torch.randint(0, 16, scale.shape, dtype=torch.uint8, device="cuda")


def randn(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, device="cuda").to(dtype)


def exact(x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
    return x.double() @ w4a16.dequantize_w4(*weight).double().T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_any_number_of_tokens(n: int, k: int, dtype: torch.dtype) -> None:
    weight = make_weight(n, k, 128 if k % 128 == 0 else 64, dtype)
    packed = w4a16.pack_fragments(*weight)
    for m in TOKENS:
        x = randn(m, k, dtype)
        out = w4a16_triton.w4a16_fragments(x, **packed)
        assert out.dtype == dtype
        assert error_ratio(out, exact(x, weight)) < BOUND[dtype], m
        assert torch.equal(out, w4a16_triton.w4a16_fragments(x, **packed)), m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("group", "k"), [(32, 576), (64, 576), (32, 4096), (64, 8960), (256, 4096), (576, 576)]
)
def test_groups(group: int, k: int, dtype: torch.dtype) -> None:
    weight = make_weight(584, k, group, dtype)
    packed = w4a16.pack_fragments(*weight)
    for m in (1, 16, 33, 64, 100, 300, 2000):
        x = randn(m, k, dtype)
        assert error_ratio(w4a16_triton.w4a16_fragments(x, **packed), exact(x, weight)) < BOUND[dtype], m


@pytest.mark.parametrize(("n", "k"), TABLE)
def test_every_row_of_the_table(n: int, k: int) -> None:
    weight = make_weight(n, k, 128)
    packed = w4a16.pack_fragments(*weight)
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 512, 1024):
        x = randn(m, k)
        out = w4a16_triton.w4a16_fragments(x, **packed)
        assert error_ratio(out, exact(x, weight)) < BOUND[torch.bfloat16], m
        for _ in range(3):
            assert torch.equal(out, w4a16_triton.w4a16_fragments(x, **packed)), m
        parts = w4a16_triton.w4a16_parts(x, **packed)
        total = parts.sum(0) if parts.dim() == 3 else parts
        assert error_ratio(total, exact(x, weight)) < BOUND[torch.bfloat16], m


@pytest.mark.parametrize("bm", [shape["BM"] for _, shape in FORMULA])
@pytest.mark.parametrize(
    ("slots", "pieces"), [(1, 0), (1000, 21), (1000, 70), (1000, 131), (1000, 320), (4, 7), (4, 40)]
)
def test_any_cut_gives_the_same_sum(bm: int, slots: int, pieces: int) -> None:
    """Pieces are added in their order: each cut has its own bits, and always those."""
    weight = make_weight(640, 4992, 128)
    x = randn(bm + 1, 4992)
    config = dict(formula(bm, 640, 4992, cores=132)) | {"SLOTS": slots, "PIECES": pieces}
    outs = []
    for _ in range(3):
        out = torch.full((bm + 1, 640), math.nan, dtype=torch.bfloat16, device="cuda")
        w4a16_triton.launch(config, 128, x, **w4a16.pack_fragments(*weight), out=out)
        outs.append(out)
    assert error_ratio(outs[0], exact(x, weight)) < BOUND[torch.bfloat16]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bm", "bn", "stages", "mode", "unroll"),
    [
        *((16, 256, 8, 0, 1), (16, 128, 4, 1, 2), (32, 256, 3, 1, 2)),
        *((64, 256, 5, 0, 1), (64, 128, 4, 0, 1), (128, 256, 4, 0, 1), (128, 128, 3, 0, 1)),
    ],
)
def test_by_warps(bm: int, bn: int, stages: int, mode: int, unroll: int, dtype: torch.dtype) -> None:
    """Rows and tokens that fill no tile, whole tiles and pieces of them; again and again the same bits."""
    weight = make_weight(656, 4992, 128, dtype)
    packed = w4a16.pack_fragments(*weight)
    for m in (1, bm - 3, 2 * bm + 1):
        x = randn(m, 4992, dtype)
        for slots, pieces in ((1, 0), (1000, 7), (1000, 60)):
            config = {"BY_WARPS": 1, "BM": bm, "BN": bn, "STAGES": stages, "EARLY": 1}
            config |= {"MODE": mode, "UNROLL": unroll, "SLOTS": slots, "PIECES": pieces}
            outs = [torch.full((m, 656), math.nan, dtype=dtype, device="cuda") for _ in range(4)]
            for out in outs:
                w4a16_triton.launch(config, 128, x, **packed, out=out)
            assert error_ratio(outs[0], exact(x, weight)) < BOUND[dtype], (m, slots, pieces)
            assert all(torch.equal(outs[0], out) for out in outs[1:]), (m, slots, pieces)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bm", "stages", "mode"), [(8, 4, 1), (16, 3, 1), (32, 4, 1), (64, 2, 0), (16, 2, 0)]
)
def test_by_quarters(bm: int, stages: int, mode: int, dtype: torch.dtype) -> None:
    """Rows, tokens and inputs that fill no tile and no four steps; fewer inputs than that; the same bits."""
    for n, k in ((656, 4992), (4096, 4096), (136, 128)):
        weight = make_weight(n, k, 128, dtype)
        packed = w4a16.pack_fragments(*weight)
        config = {"QUARTERS": 1, "BM": bm, "STAGES": stages, "MODE": mode, "EARLY": 1}
        for m in (1, bm - 3, 2 * bm + 1):
            x = randn(m, k, dtype)
            outs = [torch.full((m, n), math.nan, dtype=dtype, device="cuda") for _ in range(4)]
            for out in outs:
                w4a16_triton.launch(config, 128, x, **packed, out=out)
            assert error_ratio(outs[0], exact(x, weight)) < BOUND[dtype], (n, k, m)
            assert all(torch.equal(outs[0], out) for out in outs[1:]), (n, k, m)


def test_all_codes_and_zeros_are_exact() -> None:
    """Codes in every place of a word, against every zero; an input of one shows each alone."""
    for dtype in (torch.bfloat16, torch.float16):
        rows, places = torch.arange(128, device="cuda"), torch.arange(64, device="cuda")
        codes = ((37 * rows[:, None] + 5 * places) % 256).byte()
        zero = (rows.view(128, 1) % 16).byte()
        scale = torch.ones(128, 1, device="cuda", dtype=dtype)
        packed = w4a16.pack_fragments(codes, scale, zero)
        expected = (w4a16.unpack_nibbles(codes).int() - zero.int()).to(dtype)
        for m in (8, 16, 128):
            one_hot = torch.eye(128, device="cuda", dtype=dtype)
            outs = [w4a16_triton.w4a16_fragments(one_hot[i : i + m], **packed) for i in range(0, 128, m)]
            assert torch.equal(torch.cat(outs).T, expected), (dtype, m)
        assert torch.equal(w4a16_triton.dequantize(**packed, inputs=128, dtype=dtype), expected)


@pytest.mark.parametrize("scale", [1e-6, 300.0, -0.02])
def test_scales_of_any_size(scale: float) -> None:
    codes, ones, zero = make_weight(256, 1024, 128)
    weight = codes, torch.full_like(ones, scale), zero
    packed = w4a16.pack_fragments(*weight)
    for m in (1, 16, 64, 256):
        x = randn(m, 1024)
        out = w4a16_triton.w4a16_fragments(x, **packed)
        assert error_ratio(out, exact(x, weight)) < BOUND[torch.bfloat16], m


def test_a_token_s_result_does_not_depend_on_the_others() -> None:
    """Within one row of the table; the others hold NaN."""
    packed = w4a16.pack_fragments(*make_weight(4096, 4096, 128))
    for m in (8, 16, 32, 64, 128):
        x = torch.full((m, 4096), math.nan, device="cuda", dtype=torch.bfloat16)
        x[0] = randn(1, 4096)
        alone = w4a16_triton.w4a16_fragments(x, **packed)[0]
        x[1:] = 1.0
        assert torch.equal(alone, w4a16_triton.w4a16_fragments(x, **packed)[0])
        assert alone.isfinite().all()


def test_views_and_graphs() -> None:
    """Rows of a wider tensor, at an odd address, in a replayed graph with other inputs: as eager."""
    weight = make_weight(4096, 1024, 128)
    packed = w4a16.pack_fragments(*weight)
    for m in (1, 16, 64, 200):
        wide = randn(m + 1, 2056)
        for view in (wide[1:, 8:1032], wide[:m, 1:1025], wide.T[:1024, :m].T):
            assert error_ratio(w4a16_triton.w4a16_fragments(view, **packed), exact(view, weight)) < 4e-3
        x = randn(m, 1024)
        w4a16_triton.w4a16_fragments(x, **packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = w4a16_triton.w4a16_fragments(x, **packed)
        for _ in range(3):
            x.copy_(randn(m, 1024))
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, w4a16_triton.w4a16_fragments(x, **packed))


def test_dependent_products_in_a_row() -> None:
    """A kernel that starts before its predecessor ended must still wait for what that writes."""
    packed = w4a16.pack_fragments(*make_weight(4096, 4096, 128))
    for m in (1, 16, 64):
        x = randn(m, 4096)
        chained = x
        for _ in range(20):
            chained = w4a16_triton.w4a16_fragments(chained, **packed)
        slow = x
        for _ in range(20):
            slow = w4a16_triton.w4a16_fragments(slow, **packed)
            torch.cuda.synchronize()
        assert torch.equal(chained, slow)


@pytest.mark.large_gpu_memory
def test_offsets_past_31_bits() -> None:
    """More than 2^31 words of weight and more than 2^31 elements of output: the last rows are right."""
    codes, scale, zero = make_weight(256, 16384, 128)
    last = w4a16.pack_fragments(codes, scale, zero)
    rows = (1 << 20) + 256
    words = torch.randint(-(2**31), 2**31 - 1, (rows // 64, 128, 64, 16), dtype=torch.int32, device="cuda")
    assert words.numel() > 2**31
    words[-4:] = last["words"]
    scale_zero = torch.zeros(128, rows, dtype=torch.int32, device="cuda")
    scale_zero[:, -256:] = last["scale_zero"]
    for m in (1, 16, 64):
        x = randn(m, 16384)
        out = w4a16_triton.w4a16_fragments(x, words, scale_zero)[:, -256:]
        assert error_ratio(out, exact(x, (codes, scale, zero))) < 4e-3
    x = randn(300, 128)
    narrow = words.view(-1)[: rows * 16 * 8].view(rows // 64 * 8, 1, 64, 16)
    scales = torch.full((1, rows * 8), 0x43003C00, dtype=torch.int32, device="cuda")
    out = w4a16_triton.w4a16_fragments(x, narrow, scales)
    assert out.numel() > 2**31
    some = w4a16_triton.w4a16_fragments(x, narrow[-4:], scales[:, -256:].contiguous())
    assert error_ratio(out[:, -256:], some.double()) < 4e-3


def test_what_is_declined_says_why() -> None:
    packed = w4a16.pack_fragments(*make_weight(128, 384, 192))
    with pytest.raises(Declined, match="groups of 192"):
        w4a16_triton.w4a16_fragments(randn(1, 384), **packed)
    packed = w4a16.pack_fragments(*make_weight(100, 256, 128))
    with pytest.raises(Declined, match="padding"):
        w4a16_triton.w4a16_fragments(randn(1, 256), packed["words"], packed["scale_zero"].clone())
    with pytest.raises(Declined, match="float32"):
        w4a16_triton.w4a16_fragments(randn(1, 256).float(), **packed)
