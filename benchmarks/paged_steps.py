"""Random steps of paged attention, and of the writing before it, for paged_attention.py."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from qinfer.kernels import paged_attention_triton as attention
from qinfer.kernels import qkv_post_triton
from qinfer.kernels.ahead_triton import compiled_ahead
from qinfer.kernels.kv_format import DTYPES, KVPages
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.paged_plan_triton import RowPlan

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
KINDS = ("bfloat16", "fp8", "int8")
GEOMETRY = Geometry(KV_HEADS, PAGE, None, torch.bfloat16)

Step = tuple[Tensor, KVPages, PagedBatch]
Writing = tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_pages(count: int, kind: str) -> KVPages:
    shape = (count, KV_HEADS, PAGE, DIM)
    if kind == "int8":
        k, v = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2))
        k_scales, v_scales = (torch.rand(shape[:3], device="cuda") * 0.02 for _ in range(2))
        return KVPages(k, v, k_scales, v_scales)
    k, v = (randn(*shape).to(DTYPES[kind]) for _ in range(2))
    return KVPages(k, v)


def random_step(num_seqs: int, length: int, rows: int, kind: str) -> Step:
    """`num_seqs` sequences of `length` tokens in shuffled pages, the last `rows` of which ask."""
    per_seq = -(-length // PAGE)
    pages = random_pages(num_seqs * per_seq + 1, kind)
    table = 1 + torch.randperm(num_seqs * per_seq, device="cuda").view(num_seqs, per_seq)
    seq_lens = torch.full((num_seqs,), length, device="cuda")
    starts = torch.arange(num_seqs + 1, device="cuda") * rows
    return randn(num_seqs * rows, Q_HEADS, DIM), pages, PagedBatch(table, seq_lens, starts)


def planned(batch: PagedBatch) -> RowPlan:
    return attention.group_rows(batch, GEOMETRY)


def attend(q: Tensor, pages: KVPages, plan: RowPlan) -> Tensor:
    return attention.paged_attention(q, pages, plan, scale=DIM**-0.5)


def random_writing(num_tokens: int) -> Writing:
    """Several projections to rotate among, slots, and a rotation."""
    width = (Q_HEADS + 2 * KV_HEADS) * DIM
    inputs = [randn(num_tokens, width) for _ in range(4 if num_tokens <= 256 else 8)]
    angles = torch.rand(num_tokens, DIM // 2, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    slots = PAGE + torch.randperm(num_tokens, device="cuda")
    return inputs, slots, (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def write(x: Tensor, slots: Tensor, rotation: tuple[Tensor, Tensor], pages: KVPages) -> Tensor:
    return qkv_post_triton.qkv_post(x, pages, slots, rotation=rotation)


def compile_all(batches: Iterable[int], token_counts: Iterable[int]) -> None:
    """Compiles on all cores what will be measured, from small inputs of the same kinds."""
    steps = [(num_seqs, 100, 1) for num_seqs in sorted(set(batches))] + [(1, 300, 200)]
    with compiled_ahead():
        for kind in KINDS:
            for num_seqs, length, rows in steps:
                q, pages, batch = random_step(num_seqs, length, rows, kind)
                attend(q, pages, planned(batch))
            for count in token_counts:
                inputs, slots, rotation = random_writing(count)
                write(inputs[0], slots, rotation, random_pages(4, kind))


def rotated(writing: Writing, pages: KVPages) -> list[partial[Tensor]]:
    """One call per input of a writing."""
    inputs, slots, rotation = writing
    return [partial(write, x, slots, rotation, pages) for x in inputs]
