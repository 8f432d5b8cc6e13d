# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numbers for a GPU, which reads them from the host's memory itself: the twin of `bring`.

No copy engine takes part, for which the next kernel would wait longer than this takes (known_ids_triton.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 256  # per program: reads from the host are slow, so many are under way at once


def bring(numbers: Tensor, target: Tensor, rows: int, width: int, columns: int) -> None:
    """As its meaning."""
    count = len(numbers) - rows * (width - columns)
    _kernel[(triton.cdiv(count, NUMBERS),)](
        numbers, target, count, rows * columns, columns, width, rows * width, NUMBERS=NUMBERS, num_warps=4
    )


@triton.jit(do_not_specialize=["count", "first", "columns", "width", "rest"])
def _kernel(numbers, target, count, first, columns, width, rest, NUMBERS: tl.constexpr):
    i = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    at = tl.where(i < first, i // columns * width + i % columns, rest + i - first)
    tl.store(target + at, tl.load(numbers + at, mask=i < count, other=0), mask=i < count)
