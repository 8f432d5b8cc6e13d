"""Product with 4-bit weights against the roofline and torch.mm in bfloat16.

    python benchmarks/w4a16.py [--out benchmarks/results/w4a16-nvidia-h200.json]
    python benchmarks/w4a16.py --tune ROWS.json [--shapes 28672x4096,...] [--tokens 8,16,...]

Prints the ceilings measured in this run first, then a table, then one JSON document. Weights are random, in
groups of 128 with zero points, and rotate past the L2; times are medians of graph replays. `own` is the
kernel of this project alone, `call` what the op does after its table was asked, which for many tokens may be
to unpack the weight and call torch.mm. `share` is the time that the roofline leaves, over that of `call`.

--tune times a short list of tiles for each number of tokens, each with the ways to cut the output that fill
the GPU evenly (cuts.py), the best three with other distances to fetch ahead too, and writes the fastest as
rows of the table (kernels/configs). It compiles on all cores first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuts import cuts
from graph_timing import L2_TWICE, copy_bandwidth, microseconds, origin
from products import rotate
from torch import Tensor

from qinfer.backend import compiling_ahead
from qinfer.kernels import tiles, w4a16, w4a16_plan, w4a16_triton
from qinfer.testing import error_ratio

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
UPPER = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens of the table's rows; beyond: unpack, then torch.mm
GROUP = 128
Config = dict[str, int]


# BM, BN, MODE, UNROLL, WARPS, STAGES, REGISTERS (0: as many as the compiler likes)
MANY = (
    *((256, 128, 0, 1, 8, 3, 0), (256, 64, 0, 1, 4, 3, 0), (128, 64, 0, 1, 4, 3, 0)),
    (128, 128, 0, 1, 8, 3, 0),
)
CANDIDATES = {
    8: (
        *((8, 32, 1, 2, 1, 4, 0), (8, 64, 1, 2, 2, 4, 0), (8, 64, 1, 2, 2, 3, 0)),
        *((8, 64, 1, 1, 2, 8, 0), (8, 128, 1, 2, 4, 3, 0)),
    ),
    16: (
        *((16, 128, 1, 1, 4, 5, 168), (16, 128, 1, 1, 4, 4, 168), (16, 128, 1, 1, 4, 5, 0)),
        *((16, 64, 1, 1, 4, 6, 0), (16, 64, 1, 2, 4, 3, 0), (16, 64, 1, 1, 2, 6, 0)),
    ),
    32: (
        *((32, 128, 1, 1, 4, 5, 0), (32, 64, 1, 1, 4, 5, 0)),
        *((32, 64, 1, 2, 4, 3, 0), (32, 128, 1, 1, 4, 4, 0)),
    ),
    64: (
        *((64, 128, 1, 1, 4, 4, 0), (64, 128, 0, 1, 4, 4, 0), (64, 128, 0, 1, 4, 3, 168)),
        *((64, 64, 0, 1, 4, 4, 0), (64, 64, 0, 1, 4, 3, 0), (64, 64, 1, 1, 4, 4, 0)),
    ),
    128: (
        *((128, 64, 0, 1, 4, 3, 0), (64, 128, 0, 1, 4, 3, 168), (64, 64, 0, 1, 4, 3, 0)),
        *((128, 128, 0, 1, 8, 3, 0), (128, 128, 0, 1, 4, 2, 0)),
    ),
    256: MANY,
    512: MANY,
    1024: MANY,
}
# BN, STAGES, MODE, UNROLL of the kernel with one task per warp
BY_WARPS = {
    **{16: ((128, 4, 1, 2), (256, 4, 1, 2)), 32: ((128, 6, 1, 1), (256, 7, 1, 1))},
    **{64: ((128, 4, 0, 1), (256, 5, 0, 1), (256, 2, 0, 2)), 128: ((128, 3, 0, 1), (256, 4, 0, 1))},
}
QUARTERS = {8: (3, 4), 16: (3, 4), 32: (2, 3), 64: (2,)}  # stages of the kernel by quarters


def candidates(m: int) -> list[Config]:
    """Tiles to try for m tokens. Tokens come by the copy engine where there are many."""
    names = ("BM", "BN", "MODE", "UNROLL", "WARPS", "STAGES", "REGISTERS")
    found = [dict(zip(names, values, strict=True)) for values in CANDIDATES[m]]
    found = [tile | {"TMA": int(tile["BM"] >= 64), "AHEAD": 8} for tile in found]
    names = ("BN", "STAGES", "MODE", "UNROLL")
    for values in BY_WARPS.get(min(m, 128), ()):
        found.append({"BY_WARPS": 1, "BM": min(m, 128), **dict(zip(names, values, strict=True))})
    few = {"QUARTERS": 1, "BM": min(m, 64), "MODE": int(m <= 32)}
    return found + [few | {"STAGES": s, "EARLY": 1} for s in QUARTERS.get(min(m, 64), ()) if m <= 128]


class Weight(NamedTuple):
    """One weight in as many copies as outgrow the L2, packed and as bfloat16."""

    exact: Tensor
    packed: list[dict[str, Tensor]]
    wide: list[Tensor]


def make_weight(n: int, k: int) -> Weight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(n, k // GROUP, device="cuda") * 0.01 + 0.005).bfloat16()
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, device="cuda")
    packed = w4a16.pack_fragments(codes, scale, zero)
    exact = w4a16.dequantize_w4(codes, scale, zero)
    return Weight(
        exact,
        [{k: v.clone() for k, v in packed.items()} for _ in range(1 + L2_TWICE // codes.nbytes)],
        [exact.bfloat16() for _ in range(1 + L2_TWICE // (2 * exact.numel()))],
    )


def own(tile: Config, x: Tensor, packed: dict[str, Tensor]) -> Tensor:
    out = torch.empty(x.shape[0], packed["scale_zero"].shape[1], dtype=x.dtype, device="cuda")
    w4a16_triton.launch(tile, GROUP, x, out=out, **packed)
    return out


def checked(tile: Config, x: Tensor, weight: Weight, expected: Tensor) -> Iterator[tuple[float, Config]]:
    """The time with a tile, if the product is right."""
    if error_ratio(own(tile, x, weight.packed[0]), expected) < 4e-3:
        yield rotate(partial(own, tile, x), weight.packed, x.shape[0]), tile
    else:
        print("wrong:", *x.shape, tile)


def compile_one(tile: Config) -> str:
    """Compiles a tile's kernel, for a weight that is just large enough, into Triton's cache."""
    codes = torch.zeros(256, 128, dtype=torch.uint8, device="cuda")
    scale = torch.ones(256, 2, dtype=torch.bfloat16, device="cuda")
    packed = w4a16.pack_fragments(codes, scale, codes[:, :2])
    x = torch.zeros(tile["BM"], 256, dtype=torch.bfloat16, device="cuda")
    try:
        own(tile | {"SLOTS": 99, "PIECES": 99, "EARLY": 1}, x, packed)
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler says of a candidate
        return f"{tile}: {error}"
    return ""


def tune(shapes: list[tuple[int, int]], tokens: list[int]) -> dict[str, Any]:
    """The table's rows for the shapes, and every time that was measured."""
    cores = torch.cuda.get_device_properties("cuda").multi_processor_count
    distinct = {json.dumps(tile): tile for m in tokens for tile in candidates(m)}
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 16)) as pool:
        print(*filter(None, pool.map(compile_one, distinct.values(), chunksize=1)), sep="\n")
    rows: dict[str, list[Any]] = {}
    measured = []
    for n, k in shapes:
        weight = make_weight(n, k)
        for m in tokens:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            expected = x.float() @ weight.exact.T
            base = rotate(lambda wide, x=x: torch.mm(x, wide.T), weight.wide, m)
            times = []
            for tile in candidates(m):
                number = -(-n // tile.get("BN", 64)) * -(-m // tile["BM"])
                steps = -(-k // (w4a16.INPUTS * tile.get("UNROLL", 1)))
                for way in [{}] if "QUARTERS" in tile else cuts(number, steps, cores):
                    times += [*checked(tile | way, x, weight, expected)]
            times.sort(key=lambda entry: entry[0])
            best = [tile for _, tile in times[:4] if "AHEAD" in tile]
            best = [tile | {"AHEAD": ahead} for tile in best for ahead in (0, 4, 16, 32)]
            times += [found for tile in best for found in checked(tile, x, weight, expected)]
            times.sort(key=lambda entry: entry[0])
            measured += [(n, k, m, base, *entry) for entry in times]
            rows.setdefault(f"{n}x{k}", []).append([m, times[0][1]])
            print(f"{n}x{k} M {m}: torch.mm {base:.1f} us")
            for time, tile in times[:4]:
                print(f"    {time:.1f} us, {base / time:.2f} x  {tile}", flush=True)
    for entries in rows.values():
        entries.append([None, {"DEQUANTIZE": 1}])
    return {"rows": {"w4a16": rows}, "measured": measured}


def report() -> dict[str, Any]:
    """Every shape and number of tokens: times of the op, of its kernel and of torch.mm, and errors."""
    copy = copy_bandwidth()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiply = 2 * 8192**3 / microseconds([partial(torch.mm, a, b)] * 3) / 1e6
    print(f"copy {copy:.2f} TB/s, bf16 product of 8192^3 {multiply:.0f} TFLOP/s; weights of {SHAPES}")
    print("           N x K    M  torch.mm     call    own   call x   own x  share    error")
    rows = []
    for n, k in SHAPES:
        weight = make_weight(n, k)
        given = {m: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in TOKENS}
        with compiling_ahead():
            for x in given.values():
                w4a16_triton.w4a16_fragments(x, **weight.packed[0])
        for m, x in given.items():
            expected = x.float() @ weight.exact.T
            error = error_ratio(w4a16_triton.w4a16_fragments(x, **weight.packed[0]), expected)
            tile = next(t for upper, t in table(n, k) if m <= upper)
            row = {
                "n": n, "k": k, "m": m, "error": error,
                "torch_us": rotate(lambda wide, x=x: torch.mm(x, wide.T), weight.wide, m),
                "call_us": rotate(lambda w, x=x: w4a16_triton.w4a16_fragments(x, **w), weight.packed, m),
                "own_us": rotate(partial(own, tile, x), weight.packed, m),
            }  # fmt: skip
            floor = max(n * k * (0.5 + 4 / GROUP) / copy, 2 * m * n * k / multiply) / 1e6
            row["share"] = floor / row["call_us"]
            rows.append(row)
            base = row["torch_us"]
            print(
                f"{n:>7} x {k:<6} {m:>4} {base:>9.1f} {row['call_us']:>8.1f} {row['own_us']:>6.1f}",
                f"{base / row['call_us']:>8.2f} {base / row['own_us']:>7.2f}",
                f"{row['share']:>6.2f} {error:>8.1e}",
                flush=True,
            )
    return {**origin(), "copy_tb_s": copy, "matmul_tflop_s": multiply, "rows": rows}


def table(n: int, k: int) -> Iterator[tuple[float, Config]]:
    """The kernel's tiles by the most tokens that they are for; for more, that of the most."""
    cores = torch.cuda.get_device_properties("cuda").multi_processor_count
    choose = partial(w4a16_plan.formula, cores=cores)
    key = tiles.gpu_key(torch.cuda.get_device_name())
    last: Config = {}
    for upper in UPPER:
        found = dict(tiles.tile("w4a16", key, choose, upper, n, k))
        last = last if "DEQUANTIZE" in found else found
        yield (upper if upper < UPPER[-1] else float("inf")), last


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    parser.add_argument("--tune", type=Path, help="search tiles and write the table's rows here")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, UPPER)))
    arguments = parser.parse_args()
    if arguments.tune:
        shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in arguments.shapes.split(","))]
        found = tune(shapes, [int(m) for m in arguments.tokens.split(",")])
        arguments.tune.write_text(json.dumps(found))
        return
    document = json.dumps(report(), indent=1)
    print(document)
    if arguments.out:
        arguments.out.write_text(document + "\n")


if __name__ == "__main__":
    main()
