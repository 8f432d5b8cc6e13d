"""Writing K and V, alone and fused with norms and rotation, on a GPU against the meaning."""

import math

import pytest
import torch
from torch import Tensor

from qinfer.kernels import qkv_post as fused
from qinfer.kernels import qkv_post_triton as fused_twin
from qinfer.kernels import write_kv as meaning
from qinfer.kernels import write_kv_triton as twin
from qinfer.kernels.kv_format import FP8, KVPages, load
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

KV_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "fp8": FP8}
HEADS = 2


def empty_pages(kv: str, dim: int, num_pages: int = 8, size: int = 64) -> KVPages:
    shape = (num_pages, HEADS, size, dim)
    k, v = (torch.zeros(shape, device="cuda").to(KV_DTYPES[kv]) for _ in range(2))
    if kv == "int8":
        return KVPages(k, v, *(torch.zeros(shape[:3], device="cuda") for _ in range(2)))
    return KVPages(k, v, None, None, *((0.02, 0.03) if kv == "fp8" else (1.0, 1.0)))


def values(pages: KVPages) -> tuple[Tensor, Tensor]:
    return (
        load(pages.k, pages.k_scales, pages.k_scale, torch.float32),
        load(pages.v, pages.v_scales, pages.v_scale, torch.float32),
    )


def assert_same_pages(ours: KVPages, theirs: KVPages) -> None:
    """But page 0, which is nobody's; a number on the edge of two codes may take either."""
    for a, b in zip(values(ours), values(theirs), strict=True):
        assert error_ratio(a[1:], b[1:]) < 4e-3
        assert ((a[1:] - b[1:]).abs() > 1e-5 * b[1:].abs()).float().mean() < 2e-3


def some_slots(count: int) -> Tensor:
    slots = 64 + torch.randperm(7 * 64, device="cuda")[:count]
    if count > 3:
        slots[3] = -1
    return slots


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("count", [1, 3, 65, 257])
def test_write_kv_equals_its_meaning(kv: str, dim: int, count: int) -> None:
    wide = torch.randn(count, 10, dim, device="cuda", dtype=torch.bfloat16)
    k, v, slots = wide[:, 2:4], wide[:, 7:9], some_slots(count)  # views, as a projection gives them
    ours, theirs = empty_pages(kv, dim), empty_pages(kv, dim)
    twin.write_kv(k, v, ours, slots)
    meaning.write_kv(k, v, theirs, slots)
    assert_same_pages(ours, theirs)


def test_fp8_saturates_and_int8_takes_zeros() -> None:
    pages = empty_pages("fp8", 64)
    x = torch.full((1, HEADS, 64), 1e4, device="cuda", dtype=torch.bfloat16)
    twin.write_kv(x, -x, pages, torch.tensor([70], device="cuda"))
    assert (pages.k[1, :, 6].float() == 448).all()
    assert (pages.v[1, :, 6].float() == -448).all()
    pages = empty_pages("int8", 64)
    twin.write_kv(x * 0, x, pages, torch.tensor([70], device="cuda"))
    assert (pages.k[1, :, 6] == 0).all()
    assert (pages.v[1, :, 6] == 127).all()


FUSED = {
    "llama": {"dim": 128, "rotary": 128},
    "qwen2": {"dim": 64, "rotary": 64, "bias": True},
    "qwen3": {"dim": 128, "rotary": 128, "norms": 0.0},
    "gemma3": {"dim": 256, "rotary": 256, "norms": 1.0, "q_scale": 0.3},
    "phi, partial": {"dim": 96, "rotary": 32, "bias": True},
    "no rotation": {"dim": 80, "rotary": None},
    "split-K": {"dim": 128, "rotary": 128, "parts": 5, "norms": 0.0, "bias": True},
}


@pytest.mark.parametrize("count", [1, 33, 300])
@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("kind", FUSED)
def test_the_fused_op_equals_its_meaning(kind: str, kv: str, count: int) -> None:
    case = FUSED[kind]
    dim, rotary, parts = case["dim"], case["rotary"], case.get("parts", 1)
    width = (6 + 2 * HEADS) * dim
    shape = (count, width) if parts == 1 else (parts, count, width)
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16 if parts == 1 else torch.float32)
    rotation = norms = None
    if rotary is not None:
        angle = torch.rand(count, rotary // 2, device="cuda") * 6
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        rotation = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    if "norms" in case:
        weights = [torch.randn(dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        norms = fused.HeadNorms(*weights, 1e-6, case["norms"])
    options = {
        "rotation": rotation,
        "norms": norms,
        "bias": torch.randn(width, device="cuda", dtype=torch.bfloat16) if "bias" in case else None,
        "q_scale": case.get("q_scale", 1.0),
        "dtype": torch.bfloat16,
    }
    slots = some_slots(count)
    ours, theirs = empty_pages(kv, dim), empty_pages(kv, dim)
    expected = fused.qkv_post(qkv, theirs, slots, **options)
    q = fused_twin.qkv_post(qkv, ours, slots, **options)
    assert error_ratio(q, expected) < 1e-3
    assert_same_pages(ours, theirs)
    assert torch.equal(q, fused_twin.qkv_post(qkv, ours, slots, **options))


@pytest.mark.large_gpu_memory
def test_n01_slots_beyond_two_to_the_31_elements() -> None:
    num_pages = (1 << 31) // (HEADS * 64 * 128) + 2
    pool = torch.empty(num_pages, HEADS, 64, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, HEADS, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([num_pages * 64 - 1, 64], device="cuda")
    pool[-1].fill_(math.nan)
    twin.write_kv(x, x, KVPages(pool, pool), slots)
    assert torch.equal(pool[-1, :, -1], x[0])
    assert torch.equal(pool[1, :, 0], x[1])
    assert pool[-1, :, :-1].isnan().all()
