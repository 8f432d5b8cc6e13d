"""Paged attention, and the writing of K and V before it, against the roofline and torch's attention.

    python benchmarks/paged_attention.py [--out benchmarks/results/paged_attention-nvidia-h200.json]

Prints the ceilings measured in this run first, then a table per kernel, row by row, then one JSON document,
which is also written after each row. Times are medians of graph replays on random numbers; every cache is
larger than the L2, or the document says how large. Decode is judged by its bytes (each K and V read once)
against a copy, prefill by its operations (causal ones only) against the fastest of torch's backends, which
read contiguous K and V that were repeated for their heads beforehand. For a chunk these take the mask as they
can, by its kind or as a tensor; beside that stands the fastest without any mask on as many keys as the
chunk's rows see on average: the same work, but easier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import graph_timing as timing
import torch
from paged_steps import (
    DIM,
    KINDS,
    KV_HEADS,
    PAGE,
    Q_HEADS,
    Step,
    attend,
    compile_all,
    planned,
    randn,
    random_pages,
    random_step,
    random_writing,
    rotated,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

DECODE = (
    (256, 640),
    (64, 4096),
    (16, 4096),
    (64, 1024),
    (8, 2048),
    (1, 32768),
    (1, 8192),
)  # sequences, length
PREFILL = ((4096, 4096), (8192, 8192), (16384, 16384), (8704, 512))  # length, rows
TOKENS = (1, 16, 64, 256, 4096)
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
GRAPH_US = 5000.0  # of calls in one graph


def microseconds(*calls: Callable[[], Any]) -> float:
    """Median time of a call, of as many rounds of `calls` in one graph as take some milliseconds."""
    once = timing.microseconds(list(calls), replays=3)
    rounds = max(1, min(200, int(GRAPH_US / once / len(calls))))
    return timing.microseconds(list(calls) * rounds, replays=15 if rounds > 1 else 7)


def ceilings() -> dict[str, float]:
    """Bytes per second of a copy, counted once read and once written, and bf16 operations of a product."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    product = microseconds(lambda: a @ b)
    return {"copy_tb_s": timing.copy_bandwidth(), "matmul_tflop_s": 2 * 8192**3 / product / 1e6}


def own_time(step: Step) -> float:
    q, pages, batch = step
    plan = planned(batch)
    return microseconds(lambda: attend(q, pages, plan))


def decode_row(num_seqs: int, length: int, copy_tb_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"sequences": num_seqs, "length": length}
    for kind in KINDS:
        step = random_step(num_seqs, length, 1, kind)
        time = own_time(step)
        num_bytes = 2 * num_seqs * length * KV_HEADS * (DIM * step[1].k.itemsize + 4 * (kind == "int8"))
        row[kind] = {
            "us": time,
            "megabytes": num_bytes / 1e6,
            "share_of_copy": num_bytes / time / 1e6 / copy_tb_s,
            "speedup": row["bfloat16"]["us"] / time if kind != "bfloat16" else 1.0,
        }
    row["plan_us"] = microseconds(partial(planned, step[2]))
    cells = [f"{row[k]['us']:.1f} {row[k]['share_of_copy']:.0%} {row[k]['speedup']:.2f}x" for k in KINDS]
    show(f"{num_seqs} x {length}", *cells, f"{row['plan_us']:.1f}")
    return row


def torch_times(length: int, rows: int) -> dict[str, float]:
    """Microseconds of each of torch's backends that takes the shape, for the same result."""
    q, k, v = randn(1, Q_HEADS, rows, DIM), randn(1, Q_HEADS, length, DIM), randn(1, Q_HEADS, length, DIM)
    times = {}
    for backend in BACKENDS:
        if rows == length:
            options: dict[str, Any] = {"is_causal": True}
        elif backend == SDPBackend.CUDNN_ATTENTION:  # which knows no mask of a chunk but a tensor
            positions = torch.arange(length - rows, length, device="cuda")[:, None]
            options = {"attn_mask": torch.arange(length, device="cuda") <= positions}
        else:
            options = {"attn_mask": causal_lower_right(rows, length)}
        call = partial(scaled_dot_product_attention, q, k, v, **options)
        with sdpa_kernel(backend):
            try:
                call()
            except RuntimeError:  # torch's answer where a backend does not take a mask of this kind
                continue
            times[backend.name] = microseconds(call)
    return times


def unmasked_time(length: int, rows: int) -> float:
    """Microseconds of the fastest backend on as many keys as each row sees on average."""
    keys = length - rows // 2
    q, k, v = randn(1, Q_HEADS, rows, DIM), randn(1, Q_HEADS, keys, DIM), randn(1, Q_HEADS, keys, DIM)
    times = []
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            times.append(microseconds(partial(scaled_dot_product_attention, q, k, v)))
    return min(times)


def prefill_row(length: int, rows: int) -> dict[str, Any]:
    operations = 4 * Q_HEADS * DIM * (length * rows - rows * (rows - 1) / 2)
    library = torch_times(length, rows)
    row: dict[str, Any] = {"length": length, "rows": rows, "torch_us": library}
    if rows < length:
        row["torch_unmasked_us"] = unmasked_time(length, rows)
    for kind in KINDS:
        time = own_time(random_step(1, length, rows, kind))
        best = min(library.values())
        row[kind] = {"us": time, "tflop_s": operations / time / 1e6, "of_best_torch": best / time}
    theirs = " ".join(f"{name.split('_')[0].lower()} {time:.0f}" for name, time in library.items())
    if rows < length:
        theirs += f" unmasked {row['torch_unmasked_us']:.0f}"
    cells = [f"{row[k]['tflop_s']:.0f} {row[k]['of_best_torch']:.2f}x" for k in KINDS]
    show(f"{rows} of {length}", *cells, theirs)
    return row


def write_row(num_tokens: int, copy_tb_s: float) -> dict[str, Any]:
    """The fused op before attention, on several inputs in turn."""
    writing = random_writing(num_tokens)
    row: dict[str, Any] = {"tokens": num_tokens}
    for kind in KINDS:
        pages = random_pages(num_tokens // PAGE + 2, kind)
        time = microseconds(*rotated(writing, pages))
        kv_bytes = 2 * KV_HEADS * (DIM * pages.k.itemsize + 4 * (kind == "int8"))
        num_bytes = num_tokens * (2 * writing[0][0].shape[1] + 2 * Q_HEADS * DIM + 4 * DIM + kv_bytes)
        row[kind] = {"us": time, "share_of_copy": num_bytes / time / 1e6 / copy_tb_s}
    show(str(num_tokens), *(f"{row[k]['us']:.2f} {row[k]['share_of_copy']:.0%}" for k in KINDS))
    return row


def show(*cells: str) -> None:
    print("  ".join(cell.rjust(20) for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    out = parser.parse_args().out
    compile_all((num_seqs for num_seqs, _ in DECODE), TOKENS)
    top = ceilings()
    document: dict[str, Any] = dict(timing.origin())
    print(
        f"{document['gpu']}: copy {top['copy_tb_s']:.2f} TB/s, "
        f"bf16 product {top['matmul_tflop_s']:.0f} TFLOP/s",
        flush=True,
    )
    document |= {"ceilings": top, "decode": [], "prefill": [], "write": []}

    def keep(section: str, row: dict[str, Any]) -> None:
        document[section].append(row)
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    print(
        f"\ndecode, {Q_HEADS}/{KV_HEADS} heads of {DIM}: microseconds, share of copy, speed against bfloat16"
    )
    show("sequences x length", *KINDS, "plan, once a step")
    for shape in DECODE:
        keep("decode", decode_row(*shape, top["copy_tb_s"]))
    print("\nprefill: TFLOP/s, against the best of torch's backends")
    show("rows of length", *KINDS, "torch, microseconds")
    for shape in PREFILL:
        keep("prefill", prefill_row(*shape))
    print("\nrotation and writing of K and V: microseconds, share of copy bandwidth")
    show("tokens", *KINDS)
    for count in TOKENS:
        keep("write", write_row(count, top["copy_tb_s"]))
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
