"""Graphs of paged attention as an engine replays them: some sizes, one pool of memory, inputs that change."""

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
LANES, ROWS, MAX_PAGES, LAYERS = 8, 192, 40, 3
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": FP8}
SIZES = ((LANES, ROWS), (8, 8), (3, 3))  # sequences and rows of the graphs
STEPS = (  # sequences of (tokens before, rows now)
    [(length - 1, 1) for length in (2500, 1, 64, 65, 700, 63, 1000, 128)],
    [(2500, 1), (1, 1), (64, 1)],
    [(0, 150), (2501, 1), (65, 30)],
    [(299, 1)] * 8,
    [(0, 1)],
    [(2200, 190)],
    [(4, 1), (5, 1), (6, 1), (1999, 1), (8, 1), (9, 1), (10, 1)],
    [(3, 2)],
    [(2501, 1), (2399, 1), (2299, 1)],
    [(63, 65), (1, 1), (2000, 7), (0, 64), (640, 1), (5, 5), (2559, 1), (64, 2)],
    [(2300, 100), (2000, 90)],  # more 8-bit pages than there is scratch for
    [(2559, 1)] * 8,
)


def random_pages(kv: str) -> KVPages:
    shape = (LANES * MAX_PAGES + 1, HEADS, PAGE, DIM)
    if kv == "int8":
        numbers = [torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2)]
        return KVPages(*numbers, *(torch.rand(shape[:3], device="cuda") * 0.02 for _ in range(2)))
    return KVPages(*(torch.randn(shape, device="cuda").to(KV_DTYPES[kv]) for _ in range(2)))


class Buffers:
    """Inputs at fixed places for some sequences, and some layers' pages."""

    def __init__(self, kv: str) -> None:
        torch.manual_seed(0)
        self.layers = [random_pages(kv) for _ in range(LAYERS)]
        order = 1 + torch.randperm(LANES * MAX_PAGES, device="cuda")
        self.tables = order.view(LANES, MAX_PAGES)
        self.table = self.tables.clone()
        self.seq_lens = torch.zeros(LANES, dtype=torch.int64, device="cuda")
        self.starts = torch.zeros(LANES + 1, dtype=torch.int64, device="cuda")
        self.slots = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.qkv = torch.zeros(ROWS, HEADS * (GROUP + 2) * DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros(LAYERS, ROWS, HEADS * GROUP, DIM, device="cuda", dtype=torch.bfloat16)

    def set(self, chunks: list[tuple[int, int]]) -> None:
        """A step, in other pages each time. Rows beyond it go to no slot, to sequences of length zero."""
        self.qkv.normal_()
        self.table.copy_(self.tables[torch.randperm(LANES, device="cuda")])
        self.seq_lens.zero_()
        self.slots.fill_(-1)
        is_decode = all(new == 1 for _, new in chunks)
        spare = [int(is_decode)] * (LANES - len(chunks))
        self.starts[1:] = torch.tensor([new for _, new in chunks] + spare).cumsum(0)
        row = 0
        for i, (before, new) in enumerate(chunks):
            self.seq_lens[i] = before + new
            token = torch.arange(before, before + new, device="cuda")
            self.slots[row : row + new] = self.table[i, token // PAGE] * PAGE + token % PAGE
            row += new

    def batch(self, num_seqs: int) -> PagedBatch:
        return PagedBatch(self.table[:num_seqs], self.seq_lens[:num_seqs], self.starts[: num_seqs + 1])

    def run(self, num_seqs: int, num_rows: int) -> None:
        """All layers of a step of so many sequences and rows, padding included."""
        plan = twin.group_rows(self.batch(num_seqs), Geometry(HEADS, PAGE, None, torch.bfloat16))
        for pages, out in zip(self.layers, self.out, strict=True):
            q = qkv_post_triton.qkv_post(self.qkv[:num_rows], pages, self.slots[:num_rows])
            out[:num_rows].copy_(twin.paged_attention(q, pages, plan, scale=0.09))

    def expected(self, num_seqs: int) -> list[Tensor]:
        """What the meaning, in float32, makes of the layers' rows."""
        groups = meaning.group_rows(self.batch(num_seqs), Geometry(HEADS, PAGE, None, torch.float32))
        q = self.qkv[: int(self.starts[num_seqs]), : HEADS * GROUP * DIM].float().unflatten(1, (-1, DIM))
        return [meaning.paged_attention(q, pages, groups, scale=0.09) for pages in self.layers]


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_graphs_of_some_sizes_in_one_pool(kv: str) -> None:
    """Workspaces of one graph lie where the others' are; none leaves anything that another needs."""
    buffers = Buffers(kv)
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    for size in SIZES:
        buffers.set([(99, 1)] * size[0] if size[0] == size[1] else [(0, size[1])])
        buffers.run(*size)
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool):
            buffers.run(*size)
    for chunks in STEPS:
        count, num_rows = len(chunks), sum(new for _, new in chunks)
        size = min(s for s in SIZES if s[0] >= count and (s[0] < s[1] or num_rows == count))
        buffers.set(chunks)
        buffers.out.fill_(torch.nan)
        graphs[size].replay()
        out = buffers.out.clone()
        for ours, theirs in zip(out, buffers.expected(count), strict=True):
            assert error_ratio(ours[:num_rows], theirs) < 5e-3
        if size[0] == size[1]:
            assert (out[:, num_rows : size[1]] == 0).all()
        buffers.run(*size)
        assert torch.equal(out[:, :num_rows], buffers.out[:, :num_rows])
