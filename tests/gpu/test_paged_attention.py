"""Paged attention on a GPU against float64: NaN in everything unowned, shapes around every tile's edge."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qinfer.kernels import paged_attention_triton as twin
from qinfer.kernels import paged_widen_triton
from qinfer.kernels.kv_format import FP8, KVPages
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = FLOATS | {"int8": torch.int8, "fp8": FP8}
LIMIT = 5e-3


def random_pages(num_pages: int, heads: int, size: int, dim: int, kv: str) -> KVPages:
    shape = (num_pages, heads, size, dim)
    if kv == "int8":
        numbers = [torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2)]
        scales = [torch.rand(shape[:3], device="cuda") * 0.02 + 1e-3 for _ in range(2)]
        return KVPages(*numbers, *scales)
    numbers = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(KV_DTYPES[kv]) for _ in range(2)]
    return KVPages(*numbers, None, None, *((0.5, 0.25) if kv == "fp8" else (1.0, 1.0)))


def poison(pages: KVPages, unowned: Tensor) -> None:
    """NaN (int8: in the scales) in the slots of `unowned` [num_pages, PAGE]."""
    for numbers, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
        everywhere = unowned[:, None].expand(-1, numbers.shape[1], -1)
        if scales is not None:
            scales[everywhere] = math.nan
        elif numbers.dtype == FP8:
            numbers.view(torch.uint8)[everywhere] = 0x7F
        else:
            numbers[everywhere] = math.nan


class Step:
    """Sequences of (tokens computed before, rows now) in shuffled pages."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        kv: str,
        *,
        heads: int = 2,
        group: int = 4,
        size: int = 64,
        dim: int = 128,
        window: int | None = None,
        softcap: float | None = None,
        beyond: int | None = None,
    ) -> None:
        torch.manual_seed(len(lengths) + dim)
        needed = [-(-(before + new) // size) for before, new in lengths]
        num_pages = sum(needed) + 2
        self.pages = random_pages(num_pages, heads, size, dim, kv)
        order = (1 + torch.randperm(sum(needed))).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        unowned = torch.ones(num_pages, size, dtype=torch.bool)
        for table, (before, new) in zip(self.tables, lengths, strict=True):
            for i, page in enumerate(table):
                unowned[page, : before + new - i * size] = False
        poison(self.pages, unowned.cuda())
        width = max(1, *(len(table) for table in self.tables), 1)
        filler = num_pages - 1 if beyond is None else beyond
        table = torch.tensor([t + [filler] * (width - len(t)) for t in self.tables], device="cuda")
        starts = torch.tensor([0, *(new for _, new in lengths)], device="cuda").cumsum(0)
        seq_lens = torch.tensor([before + new for before, new in lengths], device="cuda")
        self.batch = PagedBatch(table, seq_lens, starts)
        dtype = FLOATS.get(kv, torch.bfloat16)
        self.q = torch.randn(int(starts[-1]), heads * group, dim, device="cuda").to(dtype)
        self.geometry = Geometry(heads, size, window, dtype)
        self.lengths, self.softcap = lengths, softcap

    def attend(self) -> Tensor:
        plan = twin.group_rows(self.batch, self.geometry)
        return twin.paged_attention(self.q, self.pages, plan, scale=0.09, softcap=self.softcap)

    def expected(self) -> Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64, device="cuda")
        start = 0
        for (before, new), table in zip(self.lengths, self.tables, strict=True):
            if before + new > 0:
                out[start : start + new] = self._sequence(self.q[start : start + new], table, before + new)
            start += new
        return out

    def _sequence(self, q: Tensor, table: list[int], length: int) -> Tensor:
        pages, repeat = self.pages, q.shape[1] // self.geometry.num_kv_heads
        k = meant(pages.k, pages.k_scales, pages.k_scale, table, length).repeat_interleave(repeat, 0)
        v = meant(pages.v, pages.v_scales, pages.v_scale, table, length).repeat_interleave(repeat, 0)
        logits = torch.einsum("qhd,hkd->hqk", q.double(), k) * 0.09
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        position = torch.arange(length - len(q), length, device="cuda")[:, None]
        token = torch.arange(length, device="cuda")
        hidden = token > position
        if self.geometry.window is not None:
            hidden |= token <= position - self.geometry.window
        return torch.einsum("hqk,hkd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)


def meant(stored: Tensor, scales: Tensor | None, scale: float, table: list[int], length: int) -> Tensor:
    """[Hkv, length, D] float64: what a sequence's stored numbers mean."""
    numbers = torch.stack([stored[page].double() for page in table])
    factor = scale if scales is None else scales[table].double().unsqueeze(-1)
    return (numbers * factor).transpose(0, 1).flatten(1, 2)[:, :length]


def check(step: Step) -> None:
    out = step.attend()
    assert error_ratio(out, step.expected()) < (LIMIT if out.dtype != torch.float32 else 1e-5)
    assert torch.equal(out, step.attend())


LENGTHS = [(length - 1, 1) for length in (0, 1, 15, 16, 17, 63, 64, 65, 1000, 4097)]


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_decode_of_any_length_beside_each_other(kv: str) -> None:
    check(Step(LENGTHS, kv))
    check(Step([*LENGTHS, (32767, 1)], kv))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_chunks_that_start_anywhere_mixed_with_decode(kv: str) -> None:
    check(Step([(0, 1000), (1, 1)], kv))
    check(Step([(9, 1), (0, 17), (64, 1), (300, 333), (15, 1), (4000, 1), (127, 129), (0, 2)], kv))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("group", "dim", "size"),
    [(1, 80, 64), (2, 256, 64), (7, 64, 32), (8, 128, 16), (16, 96, 64), (3, 128, 32)],
)
def test_n02_groups_head_dimensions_and_page_sizes(kv: str, group: int, dim: int, size: int) -> None:
    check(Step([(9, 1), (2500, 1), (3, 60), (64, 1)], kv, group=group, dim=dim, size=size))


@pytest.mark.parametrize("kv", ["bf16", "fp16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("group", "dim", "size"),
    [(1, 128, 64), (2, 64, 128), (4, 64, 64), (7, 128, 64), (8, 64, 64), (16, 128, 256), (5, 64, 64)],
)
def test_chunks_by_warps(kv: str, group: int, dim: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends and starts around the edges of tiles (64 tokens), of blocks and of a group's half of one."""
    lengths = [(0, 2), (0, 63), (0, 64), (1, 64), (63, 2), (62, 130), (1000, 3), (5, 1), (128, 127)]
    for scratch in (paged_widen_triton.SCRATCH_BYTES, 0):  # 0: the chunks' contexts are too long for it
        monkeypatch.setattr(paged_widen_triton, "SCRATCH_BYTES", scratch)
        check(Step([*lengths, (700, 600)], kv, group=group, dim=dim, size=size))
        check(Step([(3000, 1100)], kv, group=group, dim=dim, size=size, heads=8))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (16, None), (1024, 50.0), (None, 30.0)])
def test_windows_and_soft_caps(kv: str, window: int | None, softcap: float | None) -> None:
    lengths = [(9, 1), (1500, 1), (0, 40), (1000, 100), (6400, 1), (15, 1), (16, 1), (2000, 300)]
    step = Step(lengths, kv, window=window, softcap=softcap)
    expected = step.expected()
    if window is not None:  # the pages that no row sees any more are someone else's
        freed = torch.zeros(step.pages.k.shape[0], 64, dtype=torch.bool)
        for (before, _), table in zip(lengths, step.tables, strict=True):
            freed[table[: max(0, before + 1 - window) // 64]] = True
        poison(step.pages, freed.cuda())
    out = step.attend()
    assert error_ratio(out, expected) < LIMIT
    assert torch.equal(out, step.attend())


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 31, 64, 200])
def test_any_number_of_pieces(batch: int) -> None:
    lengths = [(3000, 1)] + [(7 * i, 1) for i in range(batch - 1)]
    check(Step(lengths, "bf16", heads=1))
    check(Step(lengths, "bf16", heads=8, group=1))


def test_rows_of_length_zero_and_sequences_without_rows() -> None:
    step = Step([(-1, 1), (500, 1), (-1, 1), (40, 2), (300, 0)], "bf16")
    check(step)
    assert (step.attend()[[0, 2]] == 0).all()


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
def test_no_page_id_beyond_a_sequence_is_followed(kv: str) -> None:
    """As many rows as a program's prefetch would need to run over: ids there lead out of all memory."""
    check(Step([(639, 1)] * 255 + [(700, 1)], kv, heads=8, beyond=1 << 40))
    check(Step([(639, 1), (100, 77), (5, 300)], kv, beyond=1 << 40))


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_timing_waits_for_inputs_that_are_still_being_made(kv: str) -> None:
    """A graph that is timed on a stream of its own read a table that was not written yet, and faulted."""
    step = Step([(639, 1)] * 256, kv, heads=8)
    expected = step.attend()
    table = step.batch.page_table.clone()
    step.batch.page_table.fill_(1 << 40)  # leads out of all memory
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    step.batch.page_table.copy_(table)
    timing = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "graph_timing.py"))
    assert timing["microseconds"]([step.attend]) > 0
    assert torch.equal(step.attend(), expected)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_n04_one_graph_serves_all_lengths_of_a_batch(kv: str) -> None:
    step = Step([(700, 1)] * 8, kv, heads=8)
    step.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attend()
    for lengths in ([701] * 8, [1, 700, 0, 64, 65, 3, 128, 600], [64] * 8):
        step.batch.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, step.attend())
    step.q.copy_(step.q[:1].expand_as(step.q))
    step.batch.page_table.copy_(step.batch.page_table[:1].expand_as(step.batch.page_table))
    graph.replay()
    assert (out == out[:1]).all()
    assert torch.equal(out, step.attend())


@pytest.mark.large_gpu_memory
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_n01_pages_beyond_two_to_the_31_elements(kv: str) -> None:
    few = Step([(200, 1), (100, 150)], kv, heads=8)
    num_pages = (1 << 31) // (8 * 64 * 128) + 40
    shift = num_pages - len(few.pages.k)
    far = []
    for stored in (few.pages.k, few.pages.v):
        pool = (
            torch.full((num_pages, *stored.shape[1:]), 127, dtype=torch.uint8, device="cuda")
            if kv == "fp8"
            else torch.full((num_pages, *stored.shape[1:]), math.nan, dtype=stored.dtype, device="cuda")
        )
        pool[shift:] = stored.view(torch.uint8) if kv == "fp8" else stored
        far.append(pool.view(stored.dtype))
    assert far[0].numel() > 1 << 31
    near = few.attend()
    few.pages = few.pages._replace(k=far[0], v=far[1])
    few.batch.page_table.add_(shift)
    assert torch.equal(near, few.attend())
