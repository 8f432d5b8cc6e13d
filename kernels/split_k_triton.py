# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the products of 8-bit weights share on a GPU: sums in parts, and an early start.

A product of few tokens has few output tiles, so K is cut as well (split-K): each program leaves the float32
sum of its share of K in a workspace, and `add_parts` adds them, in order, so that the same inputs give the
same bits. It is a kernel of its own: one program that arrived last would read all parts through one
multiprocessor, which took longer than this launch (28.6 us against 24.0, H200, 128 tokens, 4096 x 14336).

The launch costs little because of programmatic dependent launch, which a table's EARLY asks for. The next
kernel may start once all programs of this one have called `gdc_launch_dependents`, at their start (EARLY 1)
or after their last multiplication (EARLY 2, where tiles fill the GPU: programs that come too early would
crowd on few multiprocessors); and it waits in `gdc_wait` before it reads what another kernel writes. Its
weight nobody writes: while it waits, some of that already comes from the memory to the L2 cache (AHEAD).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from qinfer.kernels.pieces_triton import fetch_ahead
from qinfer.kernels.tiles import Declined, Tile


def sum_of_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, early: bool) -> Tensor:
    """parts float32 [S, M, N], whose sum over S, in order, plus bias [N] is returned as `dtype` [M, N]."""
    splits, m, n = parts.shape
    early = early and parts.is_cuda
    out = torch.empty(m, n, dtype=dtype, device=parts.device)
    block = 512 if m * n <= 300_000 else 1024
    add_parts[(triton.cdiv(m * n, block),)](
        parts,
        parts if bias is None else bias,
        out,
        m * n,
        n,
        SPLITS=splits,
        BLOCK=block,
        BIAS=bias is not None,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


@triton.jit
def add_parts(
    parts,
    bias,
    out,
    total,
    N,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [M, N] = the sum of parts [SPLITS, M, N] float32 in their order, plus bias [N]; total = M * N."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    spot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = spot < total
    y = tl.load(parts + spot, mask=inside, other=0.0)
    for i in tl.static_range(1, SPLITS):
        y += tl.load(parts + i * total.to(tl.int64) + spot, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias + spot % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + spot, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fetch_panels(panels, first, last, count, N, col, BN: tl.constexpr):
    """Asks the L2 cache for rows col .. col + BN of `count` panels [N, 128] of bytes from `first` on."""
    size = tl.minimum(N - col, BN) * 128
    for panel in range(first, tl.minimum(first + count, last)):
        fetch_ahead(panels + (tl.cast(panel, tl.int64) * N + col) * 128, size)


def splits_of(tiles: int, steps: int) -> int:
    """How often to cut K into shares of at least four steps, so that the programs fill a GPU of 132 twice."""
    return max(1, min(8, 264 // tiles, steps // 4))


def launch_options(entry: Tile, bias: Tensor | None, on_gpu: bool, **more: Any) -> dict[str, Any]:
    """A table's entry as a kernel's constants and launch options; the interpreter starts nothing early."""
    early = entry["EARLY"] if on_gpu else 0
    return {**entry, "EARLY": early, "BIAS": bias is not None, "launch_pdl": early > 0, **more}


def same_code(entry: Tile) -> Tile:
    """One entry for all whose code differs by a number only."""
    entry = {name: value for name, value in entry.items() if name != "AHEAD"}
    return {**entry, "SPLITS": min(entry["SPLITS"], 2)} if "SPLITS" in entry else entry


def check(x: Tensor, n: int, dtype: torch.dtype) -> None:
    """`Declined` for what no kernel for x [M, K] and a weight [n, K] takes."""
    if x.is_cuda and not _is_hopper(x.device):
        raise Declined(f"{torch.cuda.get_device_name(x.device)}: the kernel is made for Hopper GPUs")
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16 or x.stride(1) != 1 or n % 8:
        raise Declined(f"a weight of {n}x{x.shape[1]}: rows of x must start at multiples of 16 bytes, n of 8")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Declined(f"results of {dtype}")


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter, on a CPU, plays one with four."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
