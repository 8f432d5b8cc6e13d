"""Pages of 8 bits widened for a step's chunks, in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels import paged_widen_triton as widening
from qinfer.kernels.kv_format import FP8, KVPages, load
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.paged_attention_triton import group_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, NUM_PAGES = 3, 40
STEP = ((9, 1), (100, 60), (0, 16), (3, 1), (31, 2), (0, 65))  # (tokens before, rows now)


def random_pages(kv: str, size: int, dim: int) -> KVPages:
    shape = (NUM_PAGES, HEADS, size, dim)
    if kv == "fp8":
        k, v = (torch.randn(shape, device=DEVICE).to(FP8) for _ in range(2))
        return KVPages(k, v, None, None, 0.5, 0.25)
    k, v = (torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8) for _ in range(2))
    k_scales, v_scales = (torch.rand(shape[:3], device=DEVICE) for _ in range(2))
    return KVPages(k, v, k_scales, v_scales)


def random_batch(size: int) -> PagedBatch:
    lengths = torch.tensor([before + new for before, new in STEP], device=DEVICE)
    width = -(-int(lengths.max()) // size)
    table = torch.randint(1, NUM_PAGES, (len(STEP), width), device=DEVICE)
    starts = torch.tensor([0, *(new for _, new in STEP)], device=DEVICE).cumsum(0)
    return PagedBatch(table, lengths, starts)


def meant(numbers: Tensor, scales: Tensor | None) -> Tensor:
    return numbers.float() if scales is None else load(numbers, scales, 1.0, torch.float32)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize(("size", "dim"), [(16, 32), (128, 24)])
def test_chunks_get_wide_pages_one_after_the_other(kv: str, size: int, dim: int) -> None:
    pages, batch = random_pages(kv, size, dim), random_batch(size)
    plan = group_rows(batch, Geometry(HEADS, size, None, torch.float32))
    wide = widening.widened(pages, plan, int(batch.query_starts[-1]), torch.float32, 5)
    expected = 0
    for seq, (before, new) in enumerate(STEP):
        for nth in range(-(-(before + new) // size) if new > 1 else 0):
            ours, theirs = int(wide.table[seq, nth]), int(batch.page_table[seq, nth])
            assert ours == expected
            assert torch.equal(wide.k[ours], meant(pages.k, pages.k_scales)[theirs])
            assert torch.equal(wide.v[ours], meant(pages.v, pages.v_scales)[theirs])
            expected += 1
    assert int(plan.header[3]) == expected


def test_nothing_is_written_where_scratch_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    pages, batch = random_pages("fp8", 16, 32), random_batch(16)
    batch.seq_lens[1] += 200
    batch.page_table.resize_(len(STEP), 40).fill_(1)
    plan = group_rows(batch, Geometry(HEADS, 16, None, torch.float32))
    wide = widening.widened(pages, plan, int(batch.query_starts[-1]), torch.float32, 5)
    assert int(plan.header[3]) > len(wide.k)
    assert not wide.k.any()
    assert not wide.table.any()


def test_there_is_scratch_for_prompts_without_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their rows are shared out: each sequence may have a row alone on its last page."""
    monkeypatch.setattr(widening, "SCRATCH_BYTES", 0)
    pages = random_pages("fp8", 16, 32)
    for rows in ([17] * 6, [97, 2, 2], [16, 16], [2]):
        starts = torch.tensor([0, *rows], device=DEVICE).cumsum(0)
        table = torch.ones(len(rows), 7, dtype=torch.int64, device=DEVICE)
        batch = PagedBatch(table, torch.tensor(rows, device=DEVICE), starts)
        plan = group_rows(batch, Geometry(HEADS, 16, None, torch.float32))
        wide = widening.widened(pages, plan, sum(rows), torch.float32, 5)
        assert int(plan.header[3]) == sum(-(-count // 16) for count in rows) <= len(wide.k)
