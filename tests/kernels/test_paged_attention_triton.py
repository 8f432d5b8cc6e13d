"""The GPU kernels of paged attention against float64: in Triton's interpreter where there is no GPU."""

import math
import os
from itertools import pairwise

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import paged_attention_triton as twin
from qinfer.kernels.kv_format import KVPages, load
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.paged_plan_triton import MAX_ROUNDS, UNIT, max_items
from qinfer.kernels.tiles import Declined
from qinfer.kernels.write_kv import write_kv
from qinfer.testing import error_ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_DTYPES = {"float32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
HEADS = 2


def poisoned_pages(num_pages: int, size: int, dim: int, dtype: torch.dtype) -> KVPages:
    """NaN everywhere (int8: in the scales)."""
    shape = (num_pages, HEADS, size, dim)
    if dtype == torch.int8:
        numbers = torch.full(shape, 99, dtype=dtype)
        scales = torch.full(shape[:3], math.nan)
        return KVPages(numbers, numbers.clone(), scales, scales.clone())
    poison = torch.full(shape, math.nan).to(dtype)
    scales = (0.5, 0.25) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
    return KVPages(poison, poison.clone(), None, None, *scales)


class Step:
    """Sequences of (tokens computed before, rows now) in shuffled pages, attended by the kernels."""

    def __init__(self, lengths: list[tuple[int, int]], kv: str = "float32", size: int = 16, dim: int = 32):
        generator = torch.Generator().manual_seed(len(lengths) + size)
        needed = [-(-(before + new) // size) for before, new in lengths]
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        pages = poisoned_pages(sum(needed) + 2, size, dim, KV_DTYPES[kv])
        tables = [[order.pop() for _ in range(count)] for count in needed]
        for table, (before, new) in zip(tables, lengths, strict=True):
            token = torch.arange(before + new)
            slots = torch.tensor(table, dtype=torch.int64)[token // size] * size + token % size
            k, v = (torch.randn(len(token), HEADS, dim, generator=generator) for _ in range(2))
            write_kv(k, v, pages, slots)
        width = max(1, *map(len, tables)) if len(tables) > 1 else max(1, len(tables[0]))
        unowned = len(pages.k) - 1
        table = torch.tensor([row + [unowned] * (width - len(row)) for row in tables])
        starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
        batch = PagedBatch(table, torch.tensor([a + b for a, b in lengths]), starts)
        self.lengths, self.size, self.tables = lengths, size, tables
        self.pages = KVPages(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in pages))
        self.batch = PagedBatch(*(x.to(DEVICE) for x in batch))
        self.plan: twin.RowPlan | None = None

    def free_pages_before(self, window: int) -> None:
        """Gives away (to NaN) the pages that no row of this step sees through its window."""
        for (before, _), table in zip(self.lengths, self.tables, strict=True):
            freed = table[: max(0, before + 1 - window) // self.size]
            for numbers, scales in (
                (self.pages.k, self.pages.k_scales),
                (self.pages.v, self.pages.v_scales),
            ):
                (numbers if scales is None else scales)[freed] = math.nan

    def attend(self, q: Tensor, window: int | None = None, softcap: float | None = None) -> Tensor:
        if self.plan is None:
            self.plan = twin.group_rows(self.batch, Geometry(HEADS, self.size, window, q.dtype))
        return twin.paged_attention(q.to(DEVICE), self.pages, self.plan, scale=0.2, softcap=softcap).cpu()

    def expected(self, q: Tensor, window: int | None = None, softcap: float | None = None) -> Tensor:
        """In float64, from the numbers that the pages mean."""
        out = []
        for (before, new), table, rows in zip(
            self.lengths, self.tables, q.double().split([n for _, n in self.lengths]), strict=True
        ):
            length = before + new
            k, v = (
                load(
                    stored[table].cpu(), None if scales is None else scales[table].cpu(), scale, torch.float32
                )
                .double()
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .repeat_interleave(q.shape[1] // HEADS, 0)
                for stored, scales, scale in (
                    (self.pages.k, self.pages.k_scales, self.pages.k_scale),
                    (self.pages.v, self.pages.v_scales, self.pages.v_scale),
                )
            )
            logits = torch.einsum("qhd,hkd->hqk", rows, k) * 0.2
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            position, token = torch.arange(before, length)[:, None], torch.arange(length)
            hidden = token > position
            if window is not None:
                hidden |= token <= position - window
            weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
            out.append(torch.einsum("hqk,hkd->qhd", weights, v) if length else torch.zeros_like(rows))
        return torch.cat(out)


MIXES = {
    "one row": [(36, 1)],
    "rows of any length": [(0, 1), (63, 1), (64, 1), (64, 1), (130, 1)],
    "a row of length zero": [(-1, 1), (20, 1), (-1, 1)],
    "one long row, in pieces": [(700, 1), (3, 1)],
    "first chunk": [(0, 50)],
    "later chunk": [(33, 20)],
    "mixed": [(9, 1), (0, 17), (64, 1), (30, 33), (15, 1)],
    "as many rows as sequences": [(5, 2), (8, 0), (7, 1)],
}


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("mix", MIXES)
def test_equals_float64_with_nan_in_everything_unowned(mix: str, kv: str) -> None:
    step = Step(MIXES[mix], kv)
    q = torch.randn(sum(new for _, new in step.lengths), 6, 32)
    out = step.attend(q)
    assert error_ratio(out, step.expected(q)) < 2e-6
    assert (out[[i for i, (before, _) in enumerate(step.lengths) if before < 0]] == 0).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [1, 16, 70])
@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_windows_and_soft_caps(kv: str, window: int, softcap: float | None) -> None:
    step = Step([(9, 1), (0, 17), (300, 1), (160, 75)], kv)
    q = torch.randn(94, 4, 32)
    expected = step.expected(q, window, softcap)
    step.free_pages_before(window)
    assert error_ratio(step.attend(q, window, softcap), expected) < 2e-6


@pytest.mark.parametrize(("size", "group", "dim"), [(64, 4, 80), (32, 7, 64), (64, 1, 96), (128, 16, 32)])
@pytest.mark.parametrize("kv", ["float32", "fp8"])
def test_n02_page_sizes_groups_and_head_dimensions(kv: str, size: int, group: int, dim: int) -> None:
    step = Step([(150, 1), (100, 30)], kv, size, dim)
    q = torch.randn(31, HEADS * group, dim)
    assert error_ratio(step.attend(q), step.expected(q)) < 2e-6


def test_queries_may_be_a_view_and_repeats_give_the_same_bits() -> None:
    step = Step([(700, 1), (90, 40)])
    wide = torch.randn(41, 10, 32, device=DEVICE)
    first = twin.paged_attention(
        wide[:, :6], step.pages, twin.group_rows(step.batch, Geometry(HEADS, 16, None, wide.dtype)), scale=0.2
    ).cpu()
    again = step.attend(wide[:, :6].contiguous())
    assert torch.equal(first, again)
    assert torch.equal(again, step.attend(wide[:, :6].contiguous()))
    assert step.plan is not None
    num_items = int(step.plan.header[0])
    assert (step.plan.counters[:num_items] == 0).all()  # as the next layer needs them


def test_the_plan_cuts_every_row_once_and_within_its_bound() -> None:
    lengths = torch.tensor([0, 1, 64, 65, 5000, 129, 300, 64 * 40])
    for window, low in ((None, torch.zeros(8)), (100, (lengths - 100).clamp(min=0))):
        batch = PagedBatch(torch.zeros(8, 1, dtype=torch.int64), lengths, torch.arange(9))
        plan = twin.group_rows(
            PagedBatch(*(x.to(DEVICE) for x in batch)), Geometry(HEADS, 64, window, torch.float32)
        )
        count = int(plan.header[0])
        items = plan.items[:count].cpu().tolist()
        assert count <= max_items(8, HEADS, 4 if DEVICE == "cpu" else twin.machine_of(lengths.device).num_sms)
        for row in range(8):
            pieces = [item for item in items if item[0] == row]
            assert [item[5] for item in pieces] == list(range(len(pieces)))
            assert all(item[6] == len(pieces) and item[4] == lengths[row] for item in pieces)
            assert pieces[0][2] == low[row] // UNIT
            assert pieces[-1][3] == -(-lengths[row] // UNIT)
            assert all(a[3] == b[2] for a, b in pairwise(pieces))
            assert len(pieces) == 1 or all(item[3] > item[2] for item in pieces)


def test_the_bound_holds_for_many_long_rows() -> None:
    assert max_items(256, 8, 132) >= 256 + MAX_ROUNDS * 132 // 8


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 6])
def test_all_parts_of_a_plan_are_aligned(num_seqs: int) -> None:
    """Else a batch of another size would be compiled for anew."""
    ones = torch.ones(num_seqs, dtype=torch.int64, device=DEVICE)
    batch = PagedBatch(ones.unsqueeze(1), ones, torch.arange(num_seqs + 1, device=DEVICE))
    for heads in (1, 2, 3):
        plan = twin.group_rows(batch, Geometry(heads, 16, None, torch.float32))
        for part in (plan.header, plan.items, plan.counters, plan.prefill):
            assert part.data_ptr() % 16 == 0


def test_what_the_kernels_do_not_take_is_declined() -> None:
    step = Step([(9, 1)])
    plan = twin.group_rows(step.batch, Geometry(HEADS, 16, None, torch.float32))
    with pytest.raises(Declined, match="17 query heads"):
        twin.paged_attention(torch.zeros(1, 34, 32), step.pages, plan, scale=1.0)
    with pytest.raises(Declined, match=r"float16 and pages torch\.float32"):
        twin.paged_attention(torch.zeros(1, 4, 32, dtype=torch.float16), step.pages, plan, scale=1.0)
