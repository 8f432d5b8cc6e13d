"""The product of gate and up with the activation in its end, against the two one after the other.

    python benchmarks/gated_product.py [--out benchmarks/results/gated_product-nvidia-h200.json]

Llama-8B's MLP up to the 8-bit codes that the next product takes, from codes. Prints the bandwidth of a copy
measured in this run, then a table, then one JSON document. The baseline is the same product with all of the
gate first, then the kernel that makes codes of act(gate) * up; of few tokens both ways are these two kernels.
Inputs are random, weights rotate past the L2, times are medians of graph replays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timing import copy_bandwidth, origin
from products import copies, rotate
from torch import Tensor

from qinfer.backend import compiling_ahead
from qinfer.kernels import fused_activation_triton, gated_product_triton, w8a8_triton
from qinfer.kernels.panels import to_panels
from qinfer.kernels.quantize_per_token import fp8_per_token, int8_per_token

INNER, HIDDEN = 14336, 4096
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
KINDS = {
    "int8": (int8_per_token, fused_activation_triton.silu_mul_int8, gated_product_triton.gated_to_int8),
    "fp8": (fp8_per_token, fused_activation_triton.silu_mul_fp8, gated_product_triton.gated_to_fp8),
}


def apart(kind: str, gates: Callable[..., Any], x: tuple[Tensor, ...], scale: Tensor, weight: Tensor) -> Any:
    product = w8a8_triton.multiply(f"w8a8_{kind}", *x, weight, scale, torch.bfloat16, in_parts=True)
    return gates(product)


def together(gated: Callable[..., Any], x: tuple[Tensor, ...], scale: Tensor, weight: Tensor) -> Any:
    return gated(*x, weight, scale, torch.bfloat16, gelu=False)


def report() -> dict[str, Any]:
    copy, rows = copy_bandwidth(), []
    print(f"copy {copy:.2f} TB/s; gate and up {2 * INNER} x {HIDDEN}")
    print("kind      M   apart together  ratio  TFLOP/s together")
    for kind, (quantize, gates, gated) in KINDS.items():
        codes, scale = quantize(torch.randn(2 * INNER, HIDDEN, device="cuda"))
        scale = scale.flatten()
        weights = copies(to_panels(codes))
        given = {m: quantize(torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16)) for m in TOKENS}
        with compiling_ahead():
            for x in given.values():
                apart(kind, gates, x, scale, weights[0])
                together(gated, x, scale, weights[0])
        for m, x in given.items():
            two = rotate(partial(apart, kind, gates, x, scale), weights, m)
            one = rotate(partial(together, gated, x, scale), weights, m)
            speed = 4 * m * INNER * HIDDEN / one / 1e6
            rows.append({"kind": kind, "m": m, "apart_us": two, "together_us": one, "tflop_s": speed})
            print(f"{kind:<5} {m:>5} {two:>7.1f} {one:>8.1f} {two / one:>6.2f} {speed:>8.0f}", flush=True)
    return {**origin(), "copy_tb_s": copy, "inner": INNER, "hidden": HIDDEN, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    arguments = parser.parse_args()
    document = json.dumps(report(), indent=1)
    print(document)
    if arguments.out:
        arguments.out.write_text(document + "\n")


if __name__ == "__main__":
    main()
