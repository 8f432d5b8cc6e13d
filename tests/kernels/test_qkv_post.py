"""The fused op before attention: its meaning is that of the single ops, and its GPU twin equals it."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import qkv_post_triton as twin
from qinfer.kernels import write_kv_triton
from qinfer.kernels.kv_format import FP8, KVPages, load
from qinfer.kernels.norm import rms_norm
from qinfer.kernels.qkv_post import HeadNorms, qkv_post
from qinfer.kernels.rope import rope
from qinfer.kernels.tiles import Declined
from qinfer.kernels.write_kv import write_kv
from qinfer.testing import error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8, "fp8": FP8}
HEADS, Q_HEADS, TOKENS, SIZE = 2, 6, 7, 16
SLOTS = torch.tensor([17, 18, -1, 40, 63, 16, 33])


def empty_pages(kv: str, dim: int) -> KVPages:
    shape = (4, HEADS, SIZE, dim)
    k, v = (torch.zeros(shape).to(KV_DTYPES[kv]) for _ in range(2))
    if kv == "int8":
        return KVPages(k, v, torch.zeros(shape[:3]), torch.zeros(shape[:3]))
    return KVPages(k, v, None, None, *((0.25, 0.5) if kv == "fp8" else (1.0, 1.0)))


def on_device(pages: KVPages) -> KVPages:
    return KVPages(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in pages))


def values(pages: KVPages) -> tuple[Tensor, Tensor]:
    """But of page 0, which is nobody's."""
    k = load(pages.k, pages.k_scales, pages.k_scale, torch.float32)
    v = load(pages.v, pages.v_scales, pages.v_scale, torch.float32)
    return k[1:].cpu(), v[1:].cpu()


def rotation(rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(TOKENS, rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def test_the_meaning_is_that_of_the_single_ops() -> None:
    dim = 16
    parts = torch.randn(3, TOKENS, (Q_HEADS + 2 * HEADS) * dim)
    bias = torch.randn(parts.shape[-1])
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-6, 1.0)
    cos, sin = rotation(8)
    ours, theirs = empty_pages("float32", dim), empty_pages("float32", dim)
    q = qkv_post(parts, ours, SLOTS, rotation=(cos, sin), norms=norms, bias=bias, q_scale=0.5)
    heads = (parts.sum(0) + bias).view(TOKENS, -1, dim)
    normed = rms_norm(heads[:, Q_HEADS : Q_HEADS + HEADS], norms.k, 1e-6, 1.0)
    write_kv(rope(normed, cos, sin), heads[:, Q_HEADS + HEADS :], theirs, SLOTS)
    expected = rope(rms_norm(heads[:, :Q_HEADS], norms.q, 1e-6, 1.0), cos, sin) * 0.5
    assert (q - expected).abs().max() < 1e-5
    for a, b in zip(values(ours), values(theirs), strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("kv", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    ("dim", "rotary", "normed", "biased", "parts"),
    [
        (32, 32, False, False, 1),
        (80, 80, True, True, 1),
        (64, 32, True, False, 3),
        (96, None, False, True, 1),
    ],
)
def test_the_twin_equals_the_meaning(
    kv: str, dim: int, rotary: int | None, normed: bool, biased: bool, parts: int
) -> None:
    width = (Q_HEADS + 2 * HEADS) * dim
    qkv = torch.randn((TOKENS, width) if parts == 1 else (parts, TOKENS, width))
    turn = None if rotary is None else rotation(rotary)
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-6, 1.0) if normed else None
    bias = torch.randn(width) if biased else None
    theirs = empty_pages(kv, dim)
    expected = qkv_post(qkv, theirs, SLOTS, rotation=turn, norms=norms, bias=bias, q_scale=0.3)
    ours = on_device(empty_pages(kv, dim))
    q = twin.qkv_post(
        qkv.to(DEVICE),
        ours,
        SLOTS.to(DEVICE),
        rotation=None if turn is None else (turn[0].to(DEVICE), turn[1].to(DEVICE)),
        norms=None if norms is None else norms._replace(q=norms.q.to(DEVICE), k=norms.k.to(DEVICE)),
        bias=None if bias is None else bias.to(DEVICE),
        q_scale=0.3,
    )
    assert error_ratio(q.cpu(), expected) < 1e-6
    for a, b in zip(values(ours), values(theirs), strict=True):
        assert error_ratio(a, b) < 1e-3  # int8: a number between two codes may take either
        assert (a - b).abs().gt(1e-3 * b.abs() + 1e-6).float().mean() < 2e-3


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("dim", [32, 80])
def test_write_kv_equals_its_meaning_on_views(kv: str, dim: int) -> None:
    # eighths are fp8 numbers, so nothing is rounded: the interpreter rounds to fp8 wrongly
    wide = (torch.randint(-8, 9, (TOKENS, 10, dim)) / 8).to(DEVICE)
    k, v = wide[:, 2:4], wide[:, 7:9]
    ours, theirs = on_device(empty_pages(kv, dim)), empty_pages(kv, dim)
    write_kv_triton.write_kv(k, v, ours, SLOTS.to(DEVICE))
    write_kv(k.cpu(), v.cpu(), theirs, SLOTS)
    for a, b in zip(values(ours), values(theirs), strict=True):
        assert error_ratio(a, b) < 1e-6


def test_fp8_saturates_and_int8_takes_zeros() -> None:
    pages = on_device(empty_pages("fp8", 32))
    x = torch.full((1, HEADS, 32), 1e4, device=DEVICE)
    slot = torch.tensor([20], device=DEVICE)
    write_kv_triton.write_kv(x, -x, pages, slot)
    assert (pages.k[1, :, 4].float() == 448).all()
    assert (pages.v[1, :, 4].float() == -448).all()
    pages = on_device(empty_pages("int8", 32))
    write_kv_triton.write_kv(x * 0, x, pages, slot)
    assert (pages.k[1, :, 4] == 0).all()
    assert (pages.v[1, :, 4] == 127).all()


def test_too_many_partial_sums_are_declined() -> None:
    with pytest.raises(Declined, match="17 partial sums"):
        twin.qkv_post(torch.zeros(17, 1, 10 * 32), empty_pages("float32", 32), SLOTS[:1])
