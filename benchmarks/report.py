"""What the benchmarks of row-wise kernels share: the roofline first, a table row by row, one JSON document.

Kernels are compiled ahead, in threads, for a table has a hundred of them. The document is written after each
row, so that a run that is interrupted leaves what it has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from graph_timing import copy_bandwidth, origin

from qinfer.backend import compiling_ahead

Row = tuple[dict[str, Any], str]  # what is recorded, and the line that says it


def run(
    doc: str, calls: Callable[[], Iterable[Callable[[], Any]]], rows: Callable[[float], Iterator[Row]]
) -> None:
    """Runs a benchmark as its command line says.

    `calls` launch each kernel that there is to compile; `rows` are measured, given the bandwidth of a copy in
    TB/s.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    out = parser.parse_args().out
    torch.manual_seed(0)
    with compiling_ahead():
        for call in calls():
            call()
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s", flush=True)
    table: list[dict[str, Any]] = []
    document = {**origin(), "copy_tb_s": copy, "rows": table}
    for found, line in rows(copy):
        table.append(found)
        print(line, flush=True)
        if out:
            out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
