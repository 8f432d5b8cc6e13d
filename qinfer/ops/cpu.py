"""How products run on this CPU, told in words."""

from __future__ import annotations

from qinfer.kernels import linear_cpu as _linear_cpu
from qinfer.kernels import w4a16_cpu as _w4a16_cpu
from qinfer.kernels import w8a16_int8_cpu as _w8a16_int8_cpu


def cpu_paths() -> dict[str, str]:
    """How each product runs on this CPU, in words; a scheme that is not named runs its meaning."""
    rows = {"int8": _w8a16_int8_cpu.MAX_ROWS_OF_INT8_OP, "int4": _w4a16_cpu.MAX_ROWS_OF_INT4_OP}
    linear, product = "torch linear", "oneDNN int8 x int8"
    if not _linear_cpu.has_bfloat16_product():
        fewest = _linear_cpu.FEWEST_ROWS
        linear += f", in float32 for {fewest} rows of bfloat16 or more: no instructions for bfloat16 here"
    if not _linear_cpu.has_int8_product():
        product = "exact sums of codes in float32: no instructions for int8 here"
    widened = f"weights widened at load to bfloat16 (float32 for other activations), {linear}"
    return {
        "dense": linear,
        "w8a8-int8": f"{product}; one token by rows of float32",
        "w8a16-int8": f"torch int8 op up to {rows['int8']} rows of bfloat16, else weights widened per call",
        "w8a8-fp8": widened,
        "w8a8-fp8-static": widened,
        "w8a8-fp8-block": widened,
        "w8a16-fp8": widened,
        "w4a16": f"torch int4 op up to {rows['int4']} rows of bfloat16, else weights unpacked per call",
    }
