"""Products with 8-bit weights and bfloat16 activations against the roofline and torch.mm.

    python benchmarks/w8a16.py [--out benchmarks/results/w8a16-nvidia-h200.json] [--ops w8a16_int8,...]
    python benchmarks/w8a16.py --tune ROWS.json [--shapes 28672x4096,...] [--tokens 16,32,...]

Prints the ceilings measured in this run first, then a table, then one JSON document. Weights rotate past the
L2; times are medians of graph replays. For thousands of tokens the op widens the weight and calls torch.mm,
as its table says. --tune: as in w8a8.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import products
from products import Entry, Op, Weight, copies, main, register, splits
from torch import Tensor

from qinfer.kernels import w8a16_triton
from qinfer.kernels.panels import to_fragments
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token
from qinfer.kernels.rows_triton import table_of
from qinfer.kernels.tiles import tile

# BM, BN, BK, num_warps, num_stages
MANY = ((256, 128, 64, 8, 4), (256, 128, 64, 8, 3))
BUCKETS = (8, *products.BUCKETS)
PRODUCTS = {
    8: ((8, 64, 128, 2, 8), (8, 64, 256, 2, 4), (8, 64, 256, 2, 3), (8, 128, 256, 4, 3)),
    16: ((16, 128, 128, 4, 4), (16, 128, 128, 4, 3), (16, 64, 256, 4, 3), (16, 64, 256, 4, 4)),
    32: ((32, 128, 128, 4, 4), (32, 128, 128, 4, 3), (32, 64, 128, 4, 4), (32, 64, 256, 4, 3)),
    64: ((64, 128, 128, 4, 3), (64, 64, 128, 4, 4), (64, 64, 256, 4, 3)),
    128: ((128, 128, 64, 4, 4), (128, 64, 128, 4, 3), (128, 64, 128, 4, 4)),
    256: ((256, 128, 64, 8, 4), (256, 64, 64, 4, 3), (128, 64, 128, 4, 3), (128, 128, 64, 4, 4)),
    512: (*MANY, (256, 64, 64, 4, 3), (128, 128, 64, 4, 4)),
    1024: MANY,
    2048: MANY,
    4096: MANY,
}
QUARTERS = {8: (3, 4), 16: (3, 4), 32: (2, 3), 64: (1,)}  # stages of the kernel by quarters
BY_WARPS = {  # BM, BN and stages of the kernel with one task per warp
    16: ((16, 256, 6), (32, 128, 5)),
    32: ((32, 256, 5), (32, 128, 5)),
    64: ((64, 256, 4), (64, 128, 4)),
    128: ((128, 256, 3), (128, 192, 3), (128, 128, 4)),
}


def candidates(m: int, n: int, k: int) -> Iterator[Entry]:
    names = ("BM", "BN", "BK", "num_warps", "num_stages")
    for values in PRODUCTS[m]:
        shape = dict(zip(names, values, strict=True))
        tiles, steps = -(-m // shape["BM"]) * -(-n // shape["BN"]), -(-k // shape["BK"])
        for s in splits(tiles, steps) if m <= 512 else [1]:
            for early in (1, 2) if s > 1 else (0, 1, 2):
                for ahead in (0, 8, 32) if early and m <= 128 else (0,):
                    yield shape | {"SPLITS": s, "EARLY": early, "AHEAD": ahead}
    for stages in QUARTERS.get(m, ()):
        yield {"QUARTERS": 1, "BM": m, "STAGES": stages, "EARLY": 1}
    if m in (64, 128):
        yield {"QUARTERS": 1, "GROUPS": 2, "BM": 64, "STAGES": 3, "EARLY": 1}
    for bm, bn, stages in BY_WARPS.get(min(m, 128), ()):
        shape = {"BY_WARPS": 1, "BM": bm, "BN": bn, "STAGES": stages}
        tiles = -(-m // bm) * -(-n // bn)
        for s in [1] if tiles > 66 else [s for s in range(2, 9) if 66 < tiles * s <= 132]:
            for early in (1, 2):
                yield shape | {"SPLITS": s, "EARLY": early}
    if m >= 1024:
        yield {"WIDEN": 1}


def make_int8(wide: Tensor) -> Weight:
    codes, scale = int8_per_token(wide)
    return Weight(codes.float() * scale, scale.flatten(), copies(to_fragments(codes)), [])


def make_fp8(wide: Tensor) -> Weight:
    codes, scale = fp8_per_token(wide)
    return Weight(codes.float() * scale, scale.flatten(), copies(to_fragments(codes)), [])


def given(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def exact(inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0].float()


def run_int8(entry: Entry, inputs: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a16_triton.run(entry, inputs[0], weight, scale, None, fp8=False)


def run_fp8(entry: Entry, inputs: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a16_triton.run(entry, inputs[0], weight, scale, None, fp8=True)


def call_int8(inputs: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a16_triton.multiply("w8a16_int8", inputs[0], weight, scale, None, fp8=False)


def call_fp8(inputs: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    return w8a16_triton.multiply("w8a16_fp8", inputs[0], weight, scale, None, fp8=True)


def own(op: str, inputs: tuple[Tensor, ...], weight: Tensor, scale: Tensor) -> Tensor:
    """With the kernel's tile for the most tokens that the table leaves to it."""
    (m, k), n = inputs[0].shape, weight.shape[1]
    entry = tile(op, table_of(inputs[0].device), w8a16_triton.formula, min(m, 2048), n, k)
    return w8a16_triton.run(entry, inputs[0], weight, scale, None, fp8=op == "w8a16_fp8")


OPS = {
    name: Op(name, make, given, exact, run, call, None, candidates, 3e-3, own=partial(own, name))
    for name, make, run, call in (
        ("w8a16_int8", make_int8, run_int8, call_int8),
        ("w8a16_fp8", make_fp8, run_fp8, call_fp8),
    )
}


def start() -> None:
    register(OPS)


if __name__ == "__main__":
    main(__doc__, OPS, start, BUCKETS)
