"""What the benchmarks of 8-bit products share: weights that outgrow the L2, a report, a search for tiles."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from graph_timing import L2_TWICE, copy_bandwidth, microseconds, origin
from torch import Tensor

from qinfer.backend import compiling_ahead
from qinfer.testing import error_ratio

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
TOKENS = (1, 16, 32, 64, 128, 256, 1024, 4096)
BUCKETS = (
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    4096,
)  # tokens that tiles are measured for; the last row has no end
Entry = dict[str, int]


class Weight(NamedTuple):
    """A random weight as one op has it: exact, and in as many prepared copies as outgrow the L2."""

    exact: Tensor  # float32 [N, K]
    scale: Tensor
    prepared: list[Tensor]
    library: list[Tensor]  # the codes in rows, for torch's own products


class Op(NamedTuple):
    """How one op is measured."""

    name: str  # of its table
    make: Callable[[Tensor], Weight]  # from float32 [N, K]
    inputs: Callable[[Tensor], tuple[Tensor, ...]]  # what is given per call, from x bfloat16 [M, K]
    exact_inputs: Callable[[tuple[Tensor, ...]], Tensor]  # what they stand for, float32
    run: Callable[[Entry, tuple[Tensor, ...], Tensor, Tensor], Tensor]  # with a given tile
    call: Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]  # as the table has it
    library: Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor] | None
    candidates: Callable[[int, int, int], Iterator[Entry]]  # (m, n, k)
    limit: float  # of the error
    code: Callable[[Entry], Entry] = lambda entry: entry  # one entry for all that compile alike
    own: Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor] | None = None  # never torch's product


def copies(value: Tensor) -> list[Tensor]:
    return [value.clone() for _ in range(1 + L2_TWICE // value.nbytes)]


def rotate(call: Callable[[Tensor], Tensor], weights: list[Tensor], m: int) -> float:
    """Microseconds of a call over all weights; long enough for the clocks to settle if compute-bound."""
    number = max(len(weights), 4 if m > 256 else 10)
    calls = [partial(call, weights[i % len(weights)]) for i in range(number)]
    return microseconds(calls, 40, 0.1) if m > 256 else microseconds(calls, 9)


def splits(tiles: int, steps: int) -> list[int]:
    """Ways to cut K that leave between half a program and two programs for each of 132 multiprocessors."""
    fitting = [s for s in (2, 3, 4, 6, 8) if 64 <= tiles * s <= 280 and steps >= 4 * s]
    return ([1] if tiles >= 48 else []) + fitting or [1]


def compile_one(job: tuple[str, Entry]) -> str:
    """Compiles a tile's kernels, for a weight that is just large enough, into Triton's cache."""
    op, entry = _ops[job[0]], job[1]
    weight = op.make(torch.randn(512, 2048, device="cuda"))
    x = torch.randn(entry.get("BM", 128), 2048, device="cuda", dtype=torch.bfloat16)
    try:
        op.run(entry, op.inputs(x), weight.prepared[0], weight.scale)
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler says of a candidate
        return f"{job}: {error}"
    return ""


_ops: dict[str, Op] = {}


def register(ops: dict[str, Op]) -> None:
    """Makes ops known to the processes that compile."""
    _ops.update(ops)


def tune(
    ops: dict[str, Op], shapes: list[tuple[int, int]], tokens: list[int], start: Callable[[], None]
) -> Any:
    """The tables' rows for the shapes, and every time that was measured."""
    jobs = {
        json.dumps([op.name, op.code(entry)]): (op.name, op.code(entry))
        for op in ops.values()
        for n, k in shapes
        for m in tokens
        for entry in op.candidates(m, n, k)
    }
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 16), start) as pool:
        print(*filter(None, pool.map(compile_one, jobs.values(), chunksize=1)), sep="\n", flush=True)
    rows: dict[str, dict[str, list[Any]]] = {}
    measured = []
    for n, k in shapes:
        wide = torch.randn(n, k, device="cuda")
        for op in ops.values():
            weight = op.make(wide)
            for m in tokens:
                given = op.inputs(torch.randn(m, k, device="cuda", dtype=torch.bfloat16))
                expected = op.exact_inputs(given) @ weight.exact.T
                times = []
                for entry in op.candidates(m, n, k):
                    y = op.run(entry, given, weight.prepared[0], weight.scale)
                    if not error_ratio(y, expected) < op.limit:
                        print("wrong:", op.name, n, k, m, entry)
                        continue
                    times.append((_timed(op, entry, given, weight), entry))
                times.sort(key=lambda pair: pair[0])
                measured += [(op.name, n, k, m, *pair) for pair in times]
                upper = None if m == tokens[-1] else m
                rows.setdefault(op.name, {}).setdefault(f"{n}x{k}", []).append([upper, times[0][1]])
                best = "; ".join(f"{time:.1f} {entry}" for time, entry in times[:3])
                print(f"{op.name} {n}x{k} M {m}: {best}", flush=True)
    return {"rows": rows, "measured": measured}


def _timed(op: Op, entry: Entry, given: tuple[Tensor, ...], weight: Weight) -> float:
    return rotate(lambda w: op.run(entry, given, w, weight.scale), weight.prepared, given[0].shape[0])


def report(ops: dict[str, Op]) -> dict[str, Any]:
    """Every op, shape and number of tokens: times of the op, of torch's product of the codes, of torch.mm."""
    copy = copy_bandwidth()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiply = 2 * 8192**3 / microseconds([lambda: torch.mm(a, b)] * 3) / 1e6
    print(f"copy {copy:.2f} TB/s, bf16 product of 8192^3 {multiply:.0f} TFLOP/s")
    print("op                   N x K         M torch.mm library    call     own", end=" | ")
    print("x mm  own x  x library share   error")
    rows = []
    for n, k in SHAPES:
        wide = torch.randn(n, k, device="cuda")
        dense = copies(wide.bfloat16())
        weights = {name: op.make(wide) for name, op in ops.items()}
        given = {m: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in TOKENS}
        with compiling_ahead():
            for x in given.values():
                for name, op in ops.items():
                    op.call(op.inputs(x), weights[name].prepared[0], weights[name].scale)
        for m, x in given.items():
            base = rotate(lambda w, x=x: torch.mm(x, w.T), dense, m)
            for name, op in ops.items():
                row = _measure(op, weights[name], x)
                floor = max(n * k / copy, 2 * m * n * k / multiply / (2 if op.library else 1)) / 1e6
                row |= {"op": name, "n": n, "k": k, "m": m, "torch_mm_us": base}
                row["share"] = floor / row["call_us"]
                rows.append(row)
                library, call, own = row["library_us"] or 0, row["call_us"], row["own_us"]
                print(
                    f"{name:<16} {n:>7} x {k:<6} {m:>5}",
                    f"{base:>8.1f} {library:>7.1f} {call:>7.1f} {own:>7.1f} |",
                    f"{base / call:>4.2f} {base / own:>6.2f} {library / own:>10.2f}",
                    f"{row['share']:>6.2f} {row['error']:>8.1e}",
                    flush=True,
                )
    return {**origin(), "copy_tb_s": copy, "matmul_tflop_s": multiply, "rows": rows}


def _measure(op: Op, weight: Weight, x: Tensor) -> dict[str, Any]:
    m, given = x.shape[0], op.inputs(x)
    y = op.call(given, weight.prepared[0], weight.scale)
    row: dict[str, Any] = {
        "error": error_ratio(y, op.exact_inputs(given) @ weight.exact.T),
        "library_us": None,
    }
    row["call_us"] = rotate(lambda w: op.call(given, w, weight.scale), weight.prepared, m)
    own = op.own or op.call
    row["own_us"] = (
        rotate(lambda w: own(given, w, weight.scale), weight.prepared, m) if op.own else row["call_us"]
    )
    if op.library and (op.name != "w8a8_int8" or m > 16):  # torch._int_mm takes more than 16 rows
        library = op.library
        row["library_us"] = rotate(lambda w: library(given, w, weight.scale), weight.library, m)
    return row


def main(
    doc: str | None, ops: dict[str, Op], start: Callable[[], None], buckets: tuple[int, ...] = BUCKETS
) -> None:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    parser.add_argument("--tune", type=Path, help="search tiles and write the tables' rows here")
    parser.add_argument("--ops", default=",".join(ops))
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, buckets)))
    arguments = parser.parse_args()
    chosen = {name: ops[name] for name in arguments.ops.split(",")}
    if arguments.tune:
        shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in arguments.shapes.split(","))]
        found = tune(chosen, shapes, [int(m) for m in arguments.tokens.split(",")], start)
        arguments.tune.write_text(json.dumps(found))
        return
    document = json.dumps(report(chosen), indent=1)
    print(document)
    if arguments.out:
        arguments.out.write_text(document + "\n")
