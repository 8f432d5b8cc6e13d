"""Products of 8-bit codes, from quantized activations, against the roofline and torch's own products.

    python benchmarks/w8a8.py [--out benchmarks/results/w8a8-nvidia-h200.json] [--ops w8a8_int8,...]
    python benchmarks/w8a8.py --tune ROWS.json [--shapes 28672x4096,...] [--tokens 16,32,...]

Prints the ceilings measured in this run first, then a table, then one JSON document. Activations and weights
are normal and quantized as the ops do; weights rotate past the L2; times are medians of graph replays. The
library is torch._int_mm, which leaves scaling to another kernel, and torch._scaled_mm with a scale per row.

--tune times a short list of tiles for each number of tokens and writes the fastest as rows of the tables
(kernels/configs). It compiles on all cores first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from products import Entry, Op, Weight, copies, main, register, splits
from torch import Tensor

from qinfer.kernels import w8a8_fp8_block_triton, w8a8_triton
from qinfer.kernels.panels import to_panels
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token

# BM, BN, BK, SWAP, num_warps, num_stages
PRODUCTS = {
    16: ((16, 128, 128, 1, 4, 3), (16, 128, 128, 1, 4, 4), (16, 64, 256, 1, 4, 4), (16, 128, 256, 1, 4, 3)),
    32: ((32, 128, 128, 1, 4, 3), (32, 128, 128, 1, 4, 4), (32, 64, 256, 1, 4, 4)),
    64: ((64, 128, 128, 0, 4, 3), (64, 64, 256, 1, 4, 4), (64, 128, 256, 0, 4, 2)),
    128: (
        *((128, 128, 128, 0, 4, 3), (128, 64, 256, 1, 4, 4), (128, 128, 128, 0, 8, 4)),
        *((128, 64, 128, 1, 4, 4), (128, 64, 128, 1, 4, 8)),
    ),
    256: ((128, 128, 128, 0, 4, 3), (128, 64, 128, 1, 4, 4), (128, 128, 128, 0, 8, 4)),
}
# BM, BN, STAGES, GROUP
BY_WARPS = {
    128: ((128, 256, 3, 16),),
    256: ((128, 256, 3, 16), (256, 128, 3, 16), (128, 128, 6, 16)),
    512: ((128, 256, 3, 16), (256, 128, 3, 16), (128, 128, 6, 16)),
    1024: ((128, 256, 3, 16), (256, 128, 3, 16)),
    4096: ((128, 256, 3, 16), (128, 256, 3, 32), (256, 128, 3, 16)),
}
BLOCK_PRODUCTS = {  # BM, BN, SWAP, num_warps, num_stages
    16: ((16, 128, 1, 4, 3), (16, 128, 1, 4, 4), (16, 64, 1, 4, 6)),
    32: ((32, 128, 1, 4, 3), (32, 64, 1, 4, 6)),
    64: ((64, 128, 0, 4, 3), (64, 128, 1, 4, 3), (64, 64, 1, 4, 6)),
    128: ((128, 64, 1, 4, 4), (128, 64, 0, 4, 4)),
    256: ((128, 64, 1, 4, 4), (64, 128, 0, 4, 3)),
    512: ((128, 64, 1, 4, 4), (128, 64, 0, 4, 4)),
}


def candidates(m: int, n: int, k: int) -> Iterator[Entry]:
    names = ("BM", "BN", "BK", "SWAP", "num_warps", "num_stages")
    for values in PRODUCTS.get(m, ()):
        yield from cut(dict(zip(names, values, strict=True)), m, n, -(-k // values[2]), (0, 2))
    for bm, bn, stages, group in BY_WARPS.get(m, ()):
        tile = {"BM": bm, "BN": bn, "STAGES": stages, "GROUP": group, "num_warps": 4}
        if m > 256:
            yield tile | {"SPLITS": 1, "EARLY": 0}
        else:
            yield from cut(tile, m, n, -(-k // 128), (0,))


def block_candidates(m: int, n: int, k: int) -> Iterator[Entry]:
    names = ("BM", "BN", "SWAP", "num_warps", "num_stages")
    for values in BLOCK_PRODUCTS.get(m, ()):
        yield from cut(dict(zip(names, values, strict=True)), m, n, -(-k // 128), (0, 2))
    if m >= 128:
        for group in (8, 16):
            tile = {"BM": 128, "BN": 256, "STAGES": 4, "GROUP": group, "num_warps": 4}
            yield tile | {"SPLITS": 1, "EARLY": 0}


def cut(tile: Entry, m: int, n: int, steps: int, early: tuple[int, ...]) -> Iterator[Entry]:
    """The tile with the ways to cut K, and to start early, that are worth a try."""
    for s in splits(-(-m // tile["BM"]) * -(-n // tile["BN"]), steps):
        for e in (1,) if s > 1 else early:
            yield tile | {"SPLITS": s, "EARLY": e}


def make_int8(wide: Tensor) -> Weight:
    codes, scale = int8_per_token(wide)
    return Weight(codes.float() * scale, scale.flatten(), copies(to_panels(codes)), copies(codes))


def make_fp8(wide: Tensor) -> Weight:
    codes, scale = fp8_per_token(wide)
    return Weight(codes.float() * scale, scale.flatten(), copies(to_panels(codes)), copies(codes))


def make_blocks(wide: Tensor) -> Weight:
    n, k = wide.shape
    blocks = wide.view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    exact = (codes.float() * scale[:, None, :, None]).view(n, k)
    codes = codes.view(n, k)
    return Weight(exact, scale, copies(to_panels(codes)), copies(codes))


def exact(given: tuple[Tensor, ...]) -> Tensor:
    return given[0].float() * given[1]


def exact_groups(given: tuple[Tensor, ...]) -> Tensor:
    return given[0].float() * given[1].repeat_interleave(128, 1)


def run(entry: Entry, given: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a8_triton.multiply.run(entry, *given, weight, scale, torch.bfloat16, None)


def run_blocks(entry: Entry, given: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a8_fp8_block_triton.multiply.run(entry, *given, weight, scale, torch.bfloat16, None)


def call_int8(given: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a8_triton.multiply("w8a8_int8", *given, weight, scale, torch.bfloat16)


def call_fp8(given: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a8_triton.multiply("w8a8_fp8", *given, weight, scale, torch.bfloat16)


def call_blocks(given: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a8_fp8_block_triton.w8a8_fp8_block_codes(*given, weight, scale, torch.bfloat16)


def int_mm(given: tuple[Tensor, ...], weight: Tensor, _: Tensor) -> Tensor:
    return torch._int_mm(given[0], weight.T)


@cache
def _ones(number: int) -> Tensor:
    return torch.ones(number, device="cuda")


def scaled_mm(given: tuple[Tensor, ...], weight: Tensor, _: Tensor) -> Tensor:
    """With a scale per row and per column, whatever they are: the times do not depend on it."""
    ones = _ones(max(given[0].shape[0], weight.shape[0]))
    return torch._scaled_mm(
        given[0],
        weight.T,
        scale_a=ones[: given[0].shape[0], None],
        scale_b=ones[None, : weight.shape[0]],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


OPS = {
    "w8a8_int8": Op("w8a8_int8", make_int8, int8_per_token, exact, run, call_int8, int_mm, candidates, 3e-3),
    "w8a8_fp8": Op("w8a8_fp8", make_fp8, fp8_per_token, exact, run, call_fp8, scaled_mm, candidates, 1e-2),
    "w8a8_fp8_block": Op(
        "w8a8_fp8_block",
        make_blocks,
        w8a8_fp8_block_triton.fp8_per_group,
        exact_groups,
        run_blocks,
        call_blocks,
        scaled_mm,
        block_candidates,
        3e-3,
    ),
}


def start() -> None:
    register(OPS)


if __name__ == "__main__":
    main(__doc__, OPS, start)
