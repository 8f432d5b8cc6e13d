"""Measures the tiles of every kernel on this GPU and writes the table that chooses among them.

    python benchmarks/tune.py [--only w4a16,w8a16,w8a8,attention,rows] [--shapes 28672x4096,...] [--out TABLE]

The table is kernels/configs/<gpu>.json, where `qinfer.kernels.tiles` looks; rows of what was not measured
stay. Products are measured at the shapes given (those of Llama-8B otherwise: pass those of your models, as
rows x inputs of each fused weight), attention at head dimension 128, row-wise kernels at widths of usual
models. All kernels that a part tries are compiled first, on all cores; a part takes one to five minutes.

Take the table from a GPU that nobody else uses, and run the benchmarks of the parts before and after: they
measure what the table chose, with errors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import elementwise
import paged_steps
import products
import torch
import w4a16
import w8a8
import w8a16
from graph_timing import microseconds

from qinfer.kernels import tiles

CONFIGS = Path(tiles.__file__).parent / "configs"
PARTS = elementwise.PARTS
FEW_ROWS = ((16, 16), (None, 64))  # of partial sums, which products of few tokens leave
Table = dict[str, dict[str, list[Any]]]


class Search(NamedTuple):
    """Tiles to try for one row of a table, and what to time with each."""

    op: str
    key: str
    upper: int | None  # most tokens, rows, or sequences times KV heads, of the row
    entries: list[dict[str, int]]
    prepare: Callable[[], Callable[[], Any]]  # makes inputs; what it returns is timed
    calls: int  # in it
    repeats: int = 8  # of it in a graph


def grid(**choices: Iterable[int]) -> list[dict[str, int]]:
    """Every combination of the choices."""
    found: list[dict[str, int]] = [{}]
    for name, values in choices.items():
        found = [{**entry, name: value} for entry in found for value in values]
    return found


def attention_searches() -> Iterator[Search]:
    dim, hopper = paged_steps.DIM, torch.cuda.get_device_capability()[0] == 9
    for kind in paged_steps.KINDS:
        label, key = ("plain", f"{dim}x2") if kind == "bfloat16" else (kind, f"{dim}x1")
        entries = grid(TILE=(32, 64), num_warps=(1, 2, 4), num_stages=(2, 3, 4))
        for upper, shape in ((8, (1, 16384)), (32, (16, 4096)), (128, (64, 2048)), (None, (256, 640))):
            call = partial(_attention, *shape, 1, kind)
            programs = None if upper is None else upper * paged_steps.KV_HEADS
            yield Search(f"paged_decode_{label}", key, programs, entries, call, 1)
        if not hopper:  # whose kernel has no choices
            entries = grid(BLOCK=(64, 128), TILE=(32, 64), num_warps=(4, 8), num_stages=(2, 3), per_sm=(1, 2))
            call = partial(_attention, 1, 4096, 4096, kind)
            yield Search(f"paged_prefill_{label}", key, None, entries, call, 1, repeats=1)
    for upper, tokens in ((16, 16), (256, 256), (None, 4096)):
        entries = grid(ROWS=(1, 2, 4, 8), num_warps=(1, 2, 4))
        yield Search("qkv_post", "*", upper, entries, partial(_write, tokens), 4)


def _attention(num_seqs: int, length: int, rows: int, kind: str) -> Callable[[], Any]:
    q, pages, batch = paged_steps.random_step(num_seqs, length, rows, kind)
    return partial(paged_steps.attend, q, pages, paged_steps.planned(batch))


def _write(tokens: int) -> Callable[[], Any]:
    inputs, slots, rotation = paged_steps.random_writing(tokens)
    pages = paged_steps.random_pages(tokens // paged_steps.PAGE + 2, "bfloat16")
    calls = paged_steps.rotated((inputs[:4], slots, rotation), pages)
    return lambda: [call() for call in calls]


def row_searches() -> Iterator[Search]:
    gated, every = (2048, 8192, 16384, 24576, 32768), ((16, 16), (64, 64), (512, 512), (None, 4096))
    ops = (("rms_norm", "add_rms_norm_int8", (1024, 2048, 4096, 8192), every),
           ("rms_norm_parts", f"add_rms_norm_int8 parts {PARTS}", (1024, 2048, 4096, 8192), FEW_ROWS),
           ("gated_codes", "silu_mul_int8", gated, every),
           ("gated_parts", f"silu_mul_int8 parts {PARTS}", gated, FEW_ROWS),
           ("codes", "int8_per_token", gated, every))  # fmt: skip
    for op, case, widths, sizes in ops:
        for width in widths:
            for upper, rows in sizes:
                pieces = (1, 4, 8) if op.startswith("gated") and upper and upper <= 64 else (1,)
                call = partial(_rows, case, rows, width)
                yield Search(f"{op} {width}", "*", upper, list(row_entries(width, pieces)), call, 8, 2)
    entries = grid(ROWS=(1,), LANES=(512, 1024, 2048, 4096), num_warps=(4, 8), EARLY=(0, 1))
    for upper, rows in ((512, 64), (None, 4096)):
        yield Search("gated", "*", upper, entries, partial(_rows, "silu_mul", rows, 14336), 8, 2)


def row_entries(width: int, pieces: tuple[int, ...]) -> Iterator[dict[str, int]]:
    """Warps that leave 4 to 64 numbers of a row, or of a piece of it, to a thread."""
    for entry in grid(ROWS=(1,), PIECES=pieces, num_warps=(1, 2, 4, 8, 16, 32), EARLY=(1,)):
        if 4 <= width / entry["PIECES"] / (32 * entry["num_warps"]) <= 64:
            if entry["PIECES"] == 1:
                del entry["PIECES"]
            yield entry


def _rows(name: str, rows: int, width: int) -> Callable[[], Any]:
    case = next(case for case in elementwise.cases(rows, width, width) if case.name == name)
    sets = [case.inputs() for _ in range(8)]
    return lambda: [case.call(*inputs) for inputs in sets]


SEARCHES = {"attention": attention_searches, "rows": row_searches}


def put(search: Search, entry: dict[str, int]) -> None:
    """Makes `entry` the tile that the op takes in this process."""
    gpu = tiles.gpu_key(torch.cuda.get_device_name())
    tiles._table(gpu).setdefault(search.op, {})[search.key] = [(None, entry)]


def compile_one(job: tuple[str, int, int]) -> bool:
    """Whether entry job[2] of search job[1] compiles and runs."""
    part, place, number = job
    search = list(SEARCHES[part]())[place]
    put(search, search.entries[number])
    try:
        search.prepare()()
        torch.cuda.synchronize()
    except Exception:  # whatever the compiler or the launcher says of a candidate: it is none
        return False
    return True


def search_all(part: str) -> Table:
    """The fastest entry of every search of a part, as rows of tables."""
    searches = list(SEARCHES[part]())
    jobs: dict[tuple[str, str], tuple[str, int, int]] = {}  # one for what compiles alike
    for i, search in enumerate(searches):
        for j, entry in enumerate(search.entries):
            jobs.setdefault((search.op, json.dumps(entry)), (part, i, j))
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 16)) as pool:
        runs = dict(zip(jobs, pool.map(compile_one, jobs.values(), chunksize=1), strict=True))
    found: Table = {}
    for search in searches:
        call = search.prepare()
        times = []
        for j, entry in enumerate(search.entries):
            if runs[search.op, json.dumps(entry)]:
                put(search, entry)
                times.append((microseconds([call] * search.repeats) / search.calls, j))
        time, best = min(times)
        rows = found.setdefault(search.op, {}).setdefault(search.key, [])
        rows.append([search.upper, search.entries[best]])
        print(
            f"{search.op} {search.key} up to {search.upper}: {time:.1f} us {search.entries[best]}", flush=True
        )
    return found


def product_rows(part: str, shapes: list[tuple[int, int]]) -> Table:
    """As `search_all`, of a product: its benchmark has the search."""
    if part == "w4a16":
        rows: Table = w4a16.tune(shapes, list(w4a16.UPPER))["rows"]
        return rows
    module = {"w8a16": w8a16, "w8a8": w8a8}[part]
    buckets = w8a16.BUCKETS if part == "w8a16" else products.BUCKETS
    found: Table = products.tune(module.OPS, shapes, list(buckets), module.start)["rows"]
    return found


def merge(path: Path, found: Table) -> None:
    """Replaces the rows of the found ops and keys in the table's file."""
    table = json.loads(path.read_text()) if path.exists() else {"ops": {}}
    for op, keys in found.items():
        table["ops"].setdefault(op, {}).update(keys)
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("w4a16", "w8a16", "w8a8", *SEARCHES)
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in products.SHAPES))
    parser.add_argument("--out", type=Path, help="write the table here instead")
    arguments = parser.parse_args()
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in arguments.shapes.split(","))]
    path = arguments.out or CONFIGS / f"{tiles.gpu_key(torch.cuda.get_device_name())}.json"
    for part in arguments.only.split(","):
        if part not in parts:
            parser.error(f"--only {part}: the parts are {', '.join(parts)}")
        merge(path, search_all(part) if part in SEARCHES else product_rows(part, shapes))


if __name__ == "__main__":
    main()
