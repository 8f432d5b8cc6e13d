"""What limits a kernel, by the GPU's own counters: the rows that miss their targets, or those asked for.

    python benchmarks/counters.py [--out benchmarks/results/counters-nvidia-h200.json]
                                  [--rows w4a16:28672x4096:16,attention-int8:16x4096,...]

Runs itself under Nsight Compute (ncu), which must be on the path and may read counters. A row is
op:NxK:M, a product with its own kernel, or attention-KIND:SEQUENCESxLENGTH, decoding. Caches are empty before
each kernel, clocks are as they come, and a kernel runs several times, once for each few counters: the times
are not those of benchmarks. Prints one line a kernel: what it took, how busy DRAM, L2, tensor cores and the
schedulers were, and the three reasons why warps waited most, in warps that wait for each instruction issued.
Then one JSON document.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

MISSED = (
    *(f"w4a16:28672x4096:{m}" for m in (16, 32)),
    *(f"w4a16:4096x14336:{m}" for m in (1, 8, 16, 32, 64)),
    *(f"w4a16:6144x4096:{m}" for m in (128, 256)),
    "w4a16:4096x4096:32",
    *(f"w8a16_int8:6144x4096:{m}" for m in (16, 32, 64, 128, 256)),
    *(f"w8a16_int8:4096x4096:{m}" for m in (16, 32, 64, 256)),
    *(f"w8a8_int8:4096x14336:{m}" for m in (16, 128)),
    *(f"w8a8_fp8:28672x4096:{m}" for m in (16, 1024, 4096)),
    "w8a8_fp8:4096x14336:1024",
    "w8a8_fp8_block:28672x4096:1024",
    *(f"w8a8_fp8_block:6144x4096:{m}" for m in (64, 256)),
    "attention-int8:16x4096",
)
SECTIONS = (
    *("SpeedOfLight", "WarpStateStats", "SchedulerStats", "ComputeWorkloadAnalysis"),
    *("MemoryWorkloadAnalysis", "LaunchStats", "Occupancy"),
)
SHARES = {  # per cent of what the GPU can do at most
    "dram": r"(gpu__dram_throughput|dram__\w+)\.(avg|sum)\.pct_of_peak_sustained_elapsed",
    "l2": r"lts__t(hroughput|_sectors)\.avg\.pct_of_peak_sustained_elapsed",
    "tensor": r"sm__(inst_executed_pipe_tensor|pipe_tensor).*\.pct_of_peak_sustained_(active|elapsed)",
    "issue": r"(sm__inst_issued|smsp__issue_active)\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "warps": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
MARK = "fill"  # of the kernel that begins a row


def call_of(row: str) -> Callable[[], Any]:
    """What a row stands for, with its inputs made."""
    op, _, rest = row.partition(":")
    if op.startswith("attention-"):
        from paged_steps import attend, planned, random_step

        num_seqs, length = map(int, rest.split("x"))
        q, pages, batch = random_step(num_seqs, length, 1, op.removeprefix("attention-"))
        plan = planned(batch)
        attend(q, pages, plan)  # the first of a plan waits for it
        return partial(attend, q, pages, plan)
    shape, m = rest.split(":")
    n, k = map(int, shape.split("x"))
    x = torch.randn(int(m), k, device="cuda", dtype=torch.bfloat16)
    if op == "w4a16":
        import w4a16

        tile = next(tile for upper, tile in w4a16.table(n, k) if int(m) <= upper)
        return partial(w4a16.own, tile, x, w4a16.make_weight(n, k).packed[0])
    import w8a8
    import w8a16

    made = (w8a16.OPS | w8a8.OPS)[op]
    weight = made.make(torch.randn(n, k, device="cuda"))
    return partial(made.own or made.call, made.inputs(x), weight.prepared[0], weight.scale)


def inside(rows: list[str]) -> None:
    """Runs each row once for the profiler, behind a mark."""
    mark = torch.empty(1, device="cuda")
    for row in rows:
        call = call_of(row)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        mark.fill_(0.0)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profiled(rows: list[str]) -> list[dict[str, str]]:
    """A dict of all counters for each kernel, marks too, in the order of launches."""
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("ncu is not on the path: it comes with the CUDA toolkit, as Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        sections = [word for section in SECTIONS for word in ("--section", section)]
        command = [ncu, "--profile-from-start", "off", "--clock-control", "none", *sections]
        command += ["--page", "raw", "--csv", "--log-file", str(log)]
        subprocess.run([*command, sys.executable, __file__, "--inside", ",".join(rows)], check=True)
        lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    table = csv.reader(lines)
    names, units = next(table), next(table)
    found = [dict(zip(names, values, strict=True)) for values in table]
    return [{**kernel, "unit": units[names.index("gpu__time_duration.sum")]} for kernel in found]


def kernels(rows: list[str]) -> Iterator[dict[str, Any]]:
    """What is told of each kernel of each row."""
    row = iter(rows)
    name = ""
    for counters in profiled(rows):
        kernel = counters["Kernel Name"]
        if MARK in kernel.lower():
            name = next(row)
            continue
        scale = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "nsecond": 1e-3, "ms": 1e3}[counters["unit"]]
        stalls = {m[1]: number(v) for k, v in counters.items() if (m := STALL.fullmatch(k))}
        stalls.pop("selected", None)
        yield {
            "row": name,
            "kernel": kernel.split("(")[0],
            "grid": counters["Grid Size"],
            "us": number(counters["gpu__time_duration.sum"]) * scale,
            **{share: largest(counters, pattern) for share, pattern in SHARES.items()},
            "registers": number(counters["launch__registers_per_thread"]),
            "stalls": dict(sorted(stalls.items(), key=lambda item: -item[1])[:3]),
        }


def largest(counters: dict[str, str], pattern: str) -> float | None:
    """Of the counters whose names match; a GPU has several kinds of tensor instructions."""
    found = [number(value) for name, value in counters.items() if re.fullmatch(pattern, name) and value]
    return max(found, default=None)


def number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default=",".join(MISSED))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside.split(","))
        return
    import graph_timing

    found = []
    print(
        f"{'row':<32}{'kernel':<18}{'us':>8}{'dram':>6}{'l2':>6}{'tensor':>8}{'issue':>7}{'warps':>7}  waits"
    )
    for kernel in kernels(arguments.rows.split(",")):
        found.append(kernel)
        shares = (kernel[name] if kernel[name] is not None else float("nan") for name in SHARES)
        dram, l2, tensor, issue, warps = shares
        waits = ", ".join(f"{name} {value:.1f}" for name, value in kernel["stalls"].items())
        print(
            f"{kernel['row']:<32}{kernel['kernel'][:17]:<18}{kernel['us']:>8.1f}{dram:>6.0f}{l2:>6.0f}"
            f"{tensor:>8.0f}{issue:>7.0f}{warps:>7.0f}  {waits}",
            flush=True,
        )
    document = json.dumps({**graph_timing.origin(), "rows": found}, indent=1)
    print(document)
    if arguments.out:
        arguments.out.write_text(document + "\n")


if __name__ == "__main__":
    main()
