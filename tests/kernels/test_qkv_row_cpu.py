"""Heads of one token on the CPU: queries and pages are those of `qkv_post`, and nothing else is written."""

import pytest
import torch
from torch import Tensor

from qinfer import ops
from qinfer.kernels.kv_format import FP8, KVPages, load
from qinfer.kernels.qkv_post import HeadNorms, qkv_post

KV_HEADS, Q_HEADS, SIZE, PAGE, OFFSET = 2, 6, 16, 2, 5
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": FP8}


def empty_pages(kv: str, dim: int) -> KVPages:
    shape = (4, KV_HEADS, SIZE, dim)
    k, v = (torch.zeros(shape).to(KV_DTYPES[kv]) for _ in range(2))
    if kv == "int8":
        return KVPages(k, v, torch.zeros(shape[:3]), torch.zeros(shape[:3]))
    return KVPages(k, v, None, None, *((0.25, 0.5) if kv == "fp8" else (1.0, 1.0)))


def rotation(rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotary", "normed", "biased"),
    [(32, 32, False, False), (80, 80, True, True), (64, 32, True, False), (96, None, False, True)],
)
def test_one_token_as_by_the_meaning(
    kv: str, dim: int, rotary: int | None, normed: bool, biased: bool
) -> None:
    row = torch.randn(1, (Q_HEADS + 2 * KV_HEADS) * dim)
    bias = torch.randn(row.shape[1]) if biased else None
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-6, 1.0) if normed else None
    turn = rotation(rotary) if rotary else None
    slots = torch.tensor([PAGE * SIZE + OFFSET])
    ours, theirs = empty_pages(kv, dim), empty_pages(kv, dim)
    geometry = ops.Geometry(KV_HEADS, SIZE, None, torch.float32)

    expected = qkv_post(row, theirs, slots, rotation=turn, norms=norms, bias=bias)
    places = ops.kv_places(slots, geometry)
    q = ops.qkv_row(row, ours, places, rotation=turn, norms=norms, bias=bias, dtype=torch.float32)

    # one rounding of 16 bits, of codes one step
    bound = {"float32": 1e-5, "bfloat16": 2**-8, "int8": 1 / 127, "fp8": 2**-3}[kv]
    close = {"rtol": 2**-8 if kv == "bfloat16" else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(q, expected, **close)
    for mine, right, scales, scale in (
        (ours.k, theirs.k, (ours.k_scales, theirs.k_scales), ours.k_scale),
        (ours.v, theirs.v, (ours.v_scales, theirs.v_scales), ours.v_scale),
    ):
        a, b = (load(x, s, scale, torch.float32) for x, s in zip((mine, right), scales, strict=True))
        written = b[PAGE, :, OFFSET]
        assert (a[PAGE, :, OFFSET] - written).abs().max() <= bound * written.abs().max()
        a[PAGE, :, OFFSET] = b[PAGE, :, OFFSET]
        assert torch.equal(a, b)
