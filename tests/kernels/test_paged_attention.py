"""Paged attention and the cache's formats against float64, with NaN in everything that nobody owns."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qinfer import ops
from qinfer.kernels import write_kv as meaning
from qinfer.kernels.kv_format import load
from qinfer.testing import error_ratio

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def empty_pages(
    num_pages: int, heads: int, size: int, dim: int, dtype: torch.dtype, **scales: float
) -> ops.KVPages:
    """Pages full of NaN (int8: with NaN scales)."""
    shape = (num_pages, heads, size, dim)
    if dtype == torch.int8:
        nan = torch.full(shape[:3], math.nan)
        return ops.KVPages(
            torch.full(shape, 99, dtype=dtype), torch.full(shape, 99, dtype=dtype), nan, nan.clone()
        )
    poison = torch.full(shape, math.nan).to(dtype)
    return ops.KVPages(poison, poison.clone(), **scales)


def reference(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One sequence in float64: q [Q, Hq, D] at positions start.., k and v [L, Hkv, D]."""
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(start, start + len(q))[:, None]
    token = torch.arange(len(k))[None]
    hidden = token > position
    if window is not None:
        hidden |= token <= position - window
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)


def write(k: Tensor, v: Tensor, pages: ops.KVPages, slots: Tensor) -> None:
    geometry = ops.Geometry(k.shape[1], pages.k.shape[2], None, k.dtype)
    ops.write_kv(k, v, pages, ops.kv_places(slots, geometry))


class Batch:
    """Sequences of (computed before, new tokens) in shuffled pages."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        heads: int = 2,
        size: int = 16,
        seed: int = 0,
        **scales: float,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.size, self.dim = heads, size, 32
        needed = [-(-(before + new) // size) for before, new in lengths]
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        self.pages = empty_pages(sum(needed) + 2, heads, size, self.dim, dtype, **scales)
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.lengths = lengths
        self.k = [torch.randn(a + b, heads, self.dim, generator=generator) for a, b in lengths]
        self.v = [torch.randn(a + b, heads, self.dim, generator=generator) for a, b in lengths]
        for i, table in enumerate(self.tables):
            token = torch.arange(len(self.k[i]))
            slots = torch.tensor(table)[token // size] * size + token % size
            write(self.k[i], self.v[i], self.pages, slots)

    def attend(
        self, q: list[Tensor], scale: float, window: int | None = None, softcap: float | None = None
    ) -> list[Tensor]:
        width = max(map(len, self.tables))
        table = torch.tensor([row + [len(self.pages.k) - 1] * (width - len(row)) for row in self.tables])
        starts = torch.tensor([0, *(new for _, new in self.lengths)]).cumsum(0)
        batch = ops.PagedBatch(table, torch.tensor([a + b for a, b in self.lengths]), starts)
        groups = ops.group_rows(batch, ops.Geometry(self.heads, self.size, window, q[0].dtype))
        out = ops.paged_attention(torch.cat(q), self.pages, groups, scale=scale, softcap=softcap)
        return list(out.split([new for _, new in self.lengths]))


MIXES = {
    "one decode": [(37, 1)],
    "equal decodes": [(20, 1), (20, 1), (20, 1)],
    "uneven decodes": [(3, 1), (40, 1), (15, 1), (16, 1)],
    "buckets": [(5, 1), (700, 1), (8, 1), (690, 1)],
    "first chunk": [(0, 50)],
    "later chunk": [(33, 20)],
    "mixed": [(9, 1), (0, 17), (64, 1), (30, 33), (15, 1)],
    "long chunk": [(100, 600)],
}


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 16, 40])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_float64_with_nan_in_everything_unowned(
    mix: str, window: int | None, softcap: float | None
) -> None:
    batch = Batch(MIXES[mix], torch.float32)
    q = [torch.randn(new, 6, 32) for _, new in MIXES[mix]]
    outputs = batch.attend(q, 0.2, window, softcap)
    for i, (before, _) in enumerate(MIXES[mix]):
        expected = reference(q[i], batch.k[i], batch.v[i], before, 0.2, window, softcap)
        assert (outputs[i].double() - expected).abs().max() < 5e-6


def stored(x: Tensor, kv: str) -> Tensor:
    """What the format makes of x, by its definition."""
    if kv == "int8":
        step = x.double().abs().amax(-1, keepdim=True) / 127
        return (x.double() / step).round() * step
    return x.to(KV_DTYPES[kv]).double()


@pytest.mark.parametrize(("kv", "cost"), [("bfloat16", 5e-3), ("int8", 1.5e-2), ("fp8", 6e-2)])
def test_reads_exactly_what_the_format_stores(kv: str, cost: float) -> None:
    batch = Batch(MIXES["mixed"], KV_DTYPES[kv])
    q = [torch.randn(new, 6, 32) for _, new in MIXES["mixed"]]
    for i, out in enumerate(batch.attend(q, 0.2)):
        before = MIXES["mixed"][i][0]
        k, v = batch.k[i], batch.v[i]
        as_stored = reference(q[i], stored(k, kv), stored(v, kv), before, 0.2, None, None)
        assert (out.double() - as_stored).abs().max() < 5e-6
        assert 1e-4 < error_ratio(out, reference(q[i], k, v, before, 0.2, None, None)) < cost


def test_bfloat16_queries_over_bfloat16_pages() -> None:
    batch = Batch(MIXES["mixed"], torch.bfloat16)
    q = [torch.randn(new, 6, 32).bfloat16() for _, new in MIXES["mixed"]]
    for i, out in enumerate(batch.attend(q, 0.2)):
        k, v = batch.k[i].bfloat16(), batch.v[i].bfloat16()
        assert out.dtype == torch.bfloat16
        assert error_ratio(out, reference(q[i], k, v, MIXES["mixed"][i][0], 0.2, None, None)) < 5e-3


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 7, 16, 33]),
    size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_chunks(lengths: list[tuple[int, int]], window: int | None, size: int, seed: int) -> None:
    batch = Batch(lengths, torch.float32, size=size, seed=seed)
    q = [torch.randn(new, 4, 32) for _, new in lengths]
    for i, out in enumerate(batch.attend(q, 0.3, window)):
        expected = reference(q[i], batch.k[i], batch.v[i], lengths[i][0], 0.3, window, None)
        assert (out.double() - expected).abs().max() < 5e-6


def test_a_row_does_not_depend_on_its_batch() -> None:
    q = [torch.randn(1, 6, 32) for _ in MIXES["uneven decodes"]]
    together = Batch(MIXES["uneven decodes"], torch.float32)
    out = together.attend(q, 0.2)
    for i, (before, _) in enumerate(MIXES["uneven decodes"]):
        alone = Batch([(before, 1)], torch.float32)
        write(together.k[i], together.v[i], alone.pages, _slots(alone, before + 1))
        assert (alone.attend([q[i]], 0.2)[0] - out[i]).abs().max() < 1e-6


def _slots(batch: Batch, count: int) -> Tensor:
    token = torch.arange(count)
    return torch.tensor(batch.tables[0])[token // batch.size] * batch.size + token % batch.size


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_k14_padding_slots_leave_every_owned_page_alone(kv: str) -> None:
    pages = empty_pages(4, 2, 4, 8, KV_DTYPES[kv])
    slots = torch.arange(4, 16)
    write(torch.randn(12, 2, 8), torch.randn(12, 2, 8), pages, slots)
    before = [tensor.clone() for tensor in pages[:4] if tensor is not None]
    padded = torch.tensor([5, 9, 6, -1])
    write(torch.randn(4, 2, 8), torch.randn(4, 2, 8), pages, padded)
    for old, new in zip(before, (tensor for tensor in pages[:4] if tensor is not None), strict=True):
        assert torch.equal(old[3].view(torch.uint8), new[3].view(torch.uint8))
        assert not torch.equal(old[1].view(torch.uint8), new[1].view(torch.uint8))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_writing_by_flat_rows_is_the_meaning(kv: str) -> None:
    ours, theirs = (empty_pages(5, 3, 4, 8, KV_DTYPES[kv], k_scale=2.0, v_scale=0.5) for _ in range(2))
    heads = torch.randn(6, 7, 8)
    k, v = heads[:, :3], heads[:, 4:]  # views, as they come from one product
    slots = torch.tensor([19, 4, 11, 8, -1, 6])
    write(k, v, ours, slots)
    meaning.write_kv(k, v, theirs, slots)
    for our, their in zip(ours[:4], theirs[:4], strict=True):
        assert (our is None) == (their is None)
        if our is not None and their is not None:
            assert torch.equal(our.view(torch.uint8), their.view(torch.uint8))


def round_trip(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """x [T, H, D] through a page and back, read by attention to that token alone."""
    tokens, heads, dim = x.shape
    pages = empty_pages(tokens + 1, heads, 1, dim, dtype, k_scale=scale, v_scale=scale)
    write(x, x, pages, torch.arange(1, tokens + 1))
    table = torch.arange(1, tokens + 1).unsqueeze(1)
    batch = ops.PagedBatch(table, torch.ones(tokens, dtype=torch.int64), torch.arange(tokens + 1))
    groups = ops.group_rows(batch, ops.Geometry(heads, 1, None, torch.float32))
    return ops.paged_attention(torch.zeros_like(x), pages, groups, scale=1.0, softcap=None)


def test_k11_fp8_saturates_at_scale_one_and_is_close_when_scaled() -> None:
    x = torch.randn(64, 2, 32, generator=torch.Generator().manual_seed(0))
    x = x * (1000 / x.abs().max())
    clipped = round_trip(x, torch.float8_e4m3fn)
    assert clipped.abs().max() == 448
    assert not clipped.isnan().any()
    scaled = round_trip(x, torch.float8_e4m3fn, scale=1000 / 448)
    assert error_ratio(scaled, x) <= 0.04
    assert error_ratio(clipped, x) > 0.02


def test_int8_error_is_within_half_a_step_of_each_head() -> None:
    x = (
        torch.randn(32, 3, 64, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-3, 3, 32)[:, None, None]
    )
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((round_trip(x, torch.int8) - x).abs() <= step * 0.5001).all()
    assert (round_trip(torch.zeros(2, 1, 8), torch.int8) == 0).all()


def test_fp8_table_equals_the_cast() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pages = ops.KVPages(codes.view(1, 1, 16, 16), codes.view(1, 1, 16, 16))
    finite = codes.float().isfinite()
    for dtype in (torch.float32, torch.bfloat16):
        values = load(pages.k, None, 1.0, dtype).flatten()
        assert torch.equal(values[finite], codes.to(dtype)[finite])
