"""How products run on this CPU: whether oneDNN's int8 is exact, and all of it told in words."""

from __future__ import annotations

import logging
from functools import cache

from qinfer.kernels import w4a16_cpu as _w4a16_cpu
from qinfer.kernels import w8a8_int8_cpu as _w8a8_int8_cpu
from qinfer.kernels import w8a16_int8_cpu as _w8a16_int8_cpu

logger = logging.getLogger(__name__)


@cache
def onednn_int8_is_exact() -> bool:
    """Whether oneDNN's int8 product gives the exact integers on this processor; tried once, then known.

    Without VNNI instructions it may saturate at 16 bits. Then `w8a8_int8` runs its meaning, and says so.
    """
    exact = _w8a8_int8_cpu.gives_exact_integers()
    if not exact:
        logger.warning("w8a8_int8: oneDNN saturates on this processor; running in plain torch, which is slow")
    return exact


def cpu_paths() -> dict[str, str]:
    """How each product runs on this CPU, in words; a scheme that is not named runs its meaning."""
    rows = {"int8": _w8a16_int8_cpu.MAX_ROWS_OF_INT8_OP, "int4": _w4a16_cpu.MAX_ROWS_OF_INT4_OP}
    widened = "weights widened at load to bfloat16 (float32 for other activations), torch linear"
    exact = "oneDNN int8 x int8; one token by rows of float32"
    return {
        "dense": "torch linear",
        "w8a8-int8": exact if onednn_int8_is_exact() else "plain torch: oneDNN's int8 saturates here",
        "w8a16-int8": f"torch int8 op up to {rows['int8']} rows of bfloat16, else weights widened per call",
        "w8a8-fp8": widened,
        "w8a8-fp8-static": widened,
        "w8a8-fp8-block": widened,
        "w8a16-fp8": widened,
        "w4a16": f"torch int4 op up to {rows['int4']} rows of bfloat16, else weights unpacked per call",
    }
