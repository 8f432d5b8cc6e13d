"""Paged attention, and the writing of K and V before it, against the roofline and torch's attention.

    python benchmarks/paged_attention.py [--out benchmarks/results/paged_attention-nvidia-h200.json]

Prints the ceilings measured in this run first, then a table per kernel, then one JSON document. Times are
medians of graph replays on random numbers; every cache is larger than the L2, or the document says how large.
Decode is judged by its bytes (each K and V read once) against a copy, prefill by its operations (causal ones
only) against the fastest of torch's backends, which read contiguous K and V that were repeated for their
heads beforehand. For a chunk these take the mask as they can, by its kind or as a tensor; beside that stands
the fastest without any mask on as many keys as the chunk's rows see on average: the same work, but easier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import graph_timing as timing
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from qinfer.kernels import paged_attention_triton as attention
from qinfer.kernels import qkv_post_triton
from qinfer.kernels.kv_format import DTYPES, KVPages
from qinfer.kernels.paged_attention import Geometry, PagedBatch

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
DECODE = ((256, 640), (64, 4096), (16, 4096), (64, 1024), (1, 32768), (1, 8192))
PREFILL = ((4096, 4096), (8192, 8192), (16384, 16384), (8704, 512))  # length, rows
TOKENS = (1, 16, 64, 256, 4096)
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
KINDS = ("bfloat16", "fp8", "int8")


def microseconds(call: Callable[[], Any]) -> float:
    """Median time of a call, of as many in one graph as take some milliseconds."""
    once = timing.microseconds([call], replays=3)
    return timing.microseconds([call] * max(1, min(200, int(5000 / once))))


def ceilings() -> dict[str, float]:
    """Bytes per second of a copy, counted once read and once written, and bf16 operations of a product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    product = microseconds(lambda: a @ b)
    return {"copy_tb_s": timing.copy_bandwidth(), "matmul_tflop_s": 2 * 8192**3 / product / 1e6}


def random_pages(count: int, kind: str) -> KVPages:
    shape = (count, KV_HEADS, PAGE, DIM)
    if kind == "int8":
        k, v = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2))
        k_scales, v_scales = (torch.rand(shape[:3], device="cuda") * 0.02 for _ in range(2))
        return KVPages(k, v, k_scales, v_scales)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(DTYPES[kind]) for _ in range(2))
    return KVPages(k, v)


def step(num_seqs: int, length: int, rows: int, kind: str) -> tuple[Tensor, KVPages, PagedBatch]:
    """`num_seqs` sequences of `length` tokens in shuffled pages, the last `rows` of which ask."""
    per_seq = -(-length // PAGE)
    pages = random_pages(num_seqs * per_seq + 1, kind)
    table = 1 + torch.randperm(num_seqs * per_seq, device="cuda").view(num_seqs, per_seq)
    seq_lens = torch.full((num_seqs,), length, device="cuda")
    starts = torch.arange(num_seqs + 1, device="cuda") * rows
    q = torch.randn(num_seqs * rows, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return q, pages, PagedBatch(table, seq_lens, starts)


def attend(q: Tensor, pages: KVPages, batch: PagedBatch) -> Tensor:
    plan = attention.group_rows(batch, Geometry(KV_HEADS, PAGE, None, q.dtype))
    return attention.paged_attention(q, pages, plan, scale=DIM**-0.5)


def own_time(q: Tensor, pages: KVPages, batch: PagedBatch) -> float:
    plan = attention.group_rows(batch, Geometry(KV_HEADS, PAGE, None, q.dtype))
    return microseconds(lambda: attention.paged_attention(q, pages, plan, scale=DIM**-0.5))


def decode_row(num_seqs: int, length: int, copy_tb_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"sequences": num_seqs, "length": length}
    for kind in KINDS:
        q, pages, batch = step(num_seqs, length, 1, kind)
        time = own_time(q, pages, batch)
        num_bytes = 2 * num_seqs * length * KV_HEADS * (DIM * pages.k.itemsize + 4 * (kind == "int8"))
        row[kind] = {
            "us": time,
            "megabytes": num_bytes / 1e6,
            "share_of_copy": num_bytes / time / 1e6 / copy_tb_s,
            "speedup": row["bfloat16"]["us"] / time if kind != "bfloat16" else 1.0,
        }
    geometry = Geometry(KV_HEADS, PAGE, None, torch.bfloat16)
    row["plan_us"] = microseconds(lambda: attention.group_rows(batch, geometry))
    return row


def torch_times(length: int, rows: int) -> dict[str, float]:
    """Microseconds of each of torch's backends that takes the shape, for the same result."""
    q = torch.randn(1, Q_HEADS, rows, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, Q_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
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
    q = torch.randn(1, Q_HEADS, rows, DIM, device="cuda", dtype=torch.bfloat16)
    keys = length - rows // 2
    k, v = (torch.randn(1, Q_HEADS, keys, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            times.append(microseconds(partial(scaled_dot_product_attention, q, k, v)))
    return min(times)


def prefill_row(length: int, rows: int) -> dict[str, Any]:
    operations = 4 * Q_HEADS * DIM * (length * rows - rows * (rows - 1) / 2)
    library = torch_times(length, rows)
    best = min(library.values())
    row: dict[str, Any] = {"length": length, "rows": rows, "torch_us": library}
    if rows < length:
        row["torch_unmasked_us"] = unmasked_time(length, rows)
    for kind in KINDS:
        time = own_time(*step(1, length, rows, kind))
        row[kind] = {"us": time, "tflop_s": operations / time / 1e6, "of_best_torch": best / time}
    return row


def write_inputs(num_tokens: int) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Several projections to rotate among, slots, and a rotation."""
    width = (Q_HEADS + 2 * KV_HEADS) * DIM
    count = 4 if num_tokens <= 256 else 8
    inputs = [torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    angles = torch.rand(num_tokens, DIM // 2, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    slots = PAGE + torch.randperm(num_tokens, device="cuda")
    return inputs, slots, (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def write(inputs: list[Tensor], slots: Tensor, rotation: tuple[Tensor, Tensor], pages: KVPages) -> None:
    for x in inputs:
        qkv_post_triton.qkv_post(x, pages, slots, rotation=rotation)


def write_row(num_tokens: int, copy_tb_s: float) -> dict[str, Any]:
    """The fused op before attention, on several inputs in turn."""
    inputs, slots, rotation = write_inputs(num_tokens)
    row: dict[str, Any] = {"tokens": num_tokens}
    for kind in KINDS:
        pages = random_pages(num_tokens // PAGE + 2, kind)
        time = microseconds(partial(write, inputs, slots, rotation, pages)) / len(inputs)
        kv_bytes = 2 * KV_HEADS * (DIM * pages.k.itemsize + 4 * (kind == "int8"))
        num_bytes = num_tokens * (2 * inputs[0].shape[1] + 2 * Q_HEADS * DIM + 4 * DIM + kv_bytes)
        row[kind] = {"us": time, "share_of_copy": num_bytes / time / 1e6 / copy_tb_s}
    return row


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for line in [columns, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def compile_all() -> None:
    """Compiles on all cores what will be measured, by running it once on small inputs."""
    calls: list[Callable[[], Any]] = []
    for kind in KINDS:
        for num_seqs in sorted({num_seqs for num_seqs, _ in DECODE}):
            calls.append(partial(attend, *step(num_seqs, 100, 1, kind)))
        calls.append(partial(attend, *step(1, 300, 200, kind)))
        calls += [partial(write, *write_inputs(count), random_pages(4, kind)) for count in (TOKENS[0], 64)]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    arguments = parser.parse_args()
    compile_all()
    top = ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {top['copy_tb_s']:.2f} TB/s, "
        f"bf16 product {top['matmul_tflop_s']:.0f} TFLOP/s",
        flush=True,
    )
    decode = [decode_row(*shape, top["copy_tb_s"]) for shape in DECODE]
    show(
        f"decode, {Q_HEADS}/{KV_HEADS} heads of {DIM}: microseconds, share of copy, speed against bfloat16",
        ["batch x length", *KINDS, "plan, once a step"],
        [
            [
                f"{row['sequences']} x {row['length']}",
                *(
                    f"{row[k]['us']:.1f} {row[k]['share_of_copy']:.0%} {row[k]['speedup']:.2f}x"
                    for k in KINDS
                ),
                f"{row['plan_us']:.1f}",
            ]
            for row in decode
        ],
    )
    prefill = [prefill_row(*shape) for shape in PREFILL]
    show(
        "prefill: TFLOP/s, against the best of torch's backends",
        ["rows of length", *KINDS, "torch, microseconds"],
        [
            [
                f"{row['rows']} of {row['length']}",
                *(f"{row[k]['tflop_s']:.0f} {row[k]['of_best_torch']:.2f}x" for k in KINDS),
                " ".join(f"{name.split('_')[0].lower()} {t:.0f}" for name, t in row["torch_us"].items())
                + (f" unmasked {row['torch_unmasked_us']:.0f}" if "torch_unmasked_us" in row else ""),
            ]
            for row in prefill
        ],
    )
    write = [write_row(count, top["copy_tb_s"]) for count in TOKENS]
    show(
        "rotation and writing of K and V: microseconds, share of copy bandwidth",
        ["tokens", *KINDS],
        [
            [str(row["tokens"]), *(f"{row[k]['us']:.2f} {row[k]['share_of_copy']:.0%}" for k in KINDS)]
            for row in write
        ],
    )
    document = json.dumps(
        {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "ceilings": top,
            "decode": decode,
            "prefill": prefill,
            "write": write,
        },
        indent=1,
    )
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
