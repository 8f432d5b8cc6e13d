"""Graphs of paged attention as an engine replays them: two sizes, one pool of memory, inputs that change."""

import pytest
import torch
from torch import Tensor

from qinfer.kernels import paged_attention as meaning
from qinfer.kernels import paged_attention_triton as twin
from qinfer.kernels import qkv_post_triton
from qinfer.kernels.kv_format import FP8, KVPages
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.testing import error_ratio

pytestmark = pytest.mark.gpu

HEADS, GROUP, PAGE, DIM = 8, 4, 64, 128
WIDTH, MAX_PAGES, LAYERS = 8, 40, 3
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": FP8}
STEPS = (
    [2500, 1, 64, 65, 700, 63, 1000, 128],
    [2501, 2, 65],
    [300] * 8,
    [1],
    [5, 6, 7, 2000, 9, 10, 11],
    [2502, 2400, 2300],
    [2560] * 8,
)


def random_pages(kv: str) -> KVPages:
    shape = (WIDTH * MAX_PAGES + 1, HEADS, PAGE, DIM)
    if kv == "int8":
        numbers = [torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2)]
        return KVPages(*numbers, *(torch.rand(shape[:3], device="cuda") * 0.02 for _ in range(2)))
    return KVPages(*(torch.randn(shape, device="cuda").to(KV_DTYPES[kv]) for _ in range(2)))


class Buffers:
    """Inputs at fixed places for up to 8 sequences, and some layers' pages."""

    def __init__(self, kv: str) -> None:
        torch.manual_seed(0)
        self.layers = [random_pages(kv) for _ in range(LAYERS)]
        order = 1 + torch.randperm(WIDTH * MAX_PAGES, device="cuda")
        self.tables = order.view(WIDTH, MAX_PAGES)
        self.table = self.tables.clone()
        self.seq_lens = torch.zeros(WIDTH, dtype=torch.int64, device="cuda")
        self.slots = torch.full((WIDTH,), -1, device="cuda")
        self.starts = torch.arange(WIDTH + 1, device="cuda")
        self.qkv = torch.zeros(WIDTH, HEADS * (GROUP + 2) * DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros(LAYERS, WIDTH, HEADS * GROUP, DIM, device="cuda", dtype=torch.bfloat16)

    def set(self, lengths: list[int]) -> None:
        """A step of sequences of `lengths`, in other pages each time; the rows beyond have length zero."""
        count = len(lengths)
        self.qkv.normal_()
        self.table.copy_(self.tables[torch.randperm(WIDTH, device="cuda")])
        self.seq_lens.zero_()
        self.slots.fill_(-1)
        last = torch.tensor(lengths, device="cuda") - 1
        self.seq_lens[:count] = last + 1
        self.slots[:count] = self.table[torch.arange(count, device="cuda"), last // PAGE] * PAGE + last % PAGE

    def batch(self, size: int) -> PagedBatch:
        return PagedBatch(self.table[:size], self.seq_lens[:size], self.starts[: size + 1])

    def run(self, size: int) -> None:
        """All layers of a step of `size` rows."""
        plan = twin.group_rows(self.batch(size), Geometry(HEADS, PAGE, None, torch.bfloat16))
        for pages, out in zip(self.layers, self.out, strict=True):
            q = qkv_post_triton.qkv_post(self.qkv[:size], pages, self.slots[:size])
            out[:size].copy_(twin.paged_attention(q, pages, plan, scale=0.09))

    def expected(self, count: int) -> list[Tensor]:
        """What the meaning, in float32, makes of the layers' first `count` rows."""
        groups = meaning.group_rows(self.batch(count), Geometry(HEADS, PAGE, None, torch.float32))
        q = self.qkv[:count, : HEADS * GROUP * DIM].float().view(count, -1, DIM)
        return [meaning.paged_attention(q, pages, groups, scale=0.09) for pages in self.layers]


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_graphs_of_two_sizes_in_one_pool(kv: str) -> None:
    """Workspaces of one graph lie where the other's are; neither leaves anything that the other needs."""
    buffers = Buffers(kv)
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    for size in (8, 3):
        buffers.set([100] * size)
        buffers.run(size)
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool):
            buffers.run(size)
    for lengths in STEPS:
        size = 3 if len(lengths) <= 3 else 8
        buffers.set(lengths)
        buffers.out.fill_(torch.nan)
        graphs[size].replay()
        out, count = buffers.out.clone(), len(lengths)
        for ours, theirs in zip(out, buffers.expected(count), strict=True):
            assert error_ratio(ours[:count], theirs) < 5e-3
        assert (out[:, count:size] == 0).all()
        buffers.run(size)
        assert torch.equal(out[:, :size], buffers.out[:, :size])
