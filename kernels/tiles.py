"""Which tile a kernel uses for a shape: a pure look-up in tables that benchmarks/tune.py measured.

A table is `configs/<gpu>.json`: {"ops": {op: {"NxK": [[m_upper, {"BLOCK_M": 16, ...}], ...]}}}, rows in
rising order of `m_upper`; the last one has null, which means any M. Attention and element-wise ops use one
key, "*". A GPU or a shape without a row falls to the op's own formula, which is said once in the log, never
silently. Nothing is tuned at run time: that would time kernels in a server, and give two runs two answers.

"<op> in parts" has rows that go before the op's own where whoever takes the product adds up its parts: in a
chain of a model's kernels another tile is fastest than for a product that must add them up itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Tile = Mapping[str, Any]
Formula = Callable[[int, int, int], Tile]  # (m, n, k)

logger = logging.getLogger(__name__)


class Declined(Exception):
    """A fast path does not take this input; the reason is one clause for the log."""


def tile(
    op: str, gpu: str, formula: Formula, m: int, n: int = 0, k: int = 0, *, in_parts: bool = False
) -> Tile:
    """The tile of `op` for M rows and a weight [n, k] (0: the op has none) on `gpu` ("nvidia-h200").

    in_parts: of a product that may leave partial sums.
    """
    table, key = _table(gpu), f"{n}x{k}" if n else "*"
    rows = table.get(op, {}).get(key)
    if rows is None:
        _say_once(op, gpu, n, k)
        return formula(m, n, k)
    if in_parts:
        rows = table.get(f"{op} in parts", {}).get(key, []) + rows
    return next(entry for upper, entry in rows if upper is None or m <= upper)


def each_row(op: str, gpu: str, key: str = "*") -> list[int]:
    """A number of rows M for each row of an op's table, in order; 1 and 4096 where there is no table."""
    uppers = [upper for upper, _ in _table(gpu).get(op, {}).get(key, [])]
    return [upper or 1 + max((u for u in uppers if u), default=0) for upper in uppers] or [1, 4096]


def gpu_key(name: str) -> str:
    """File name of a GPU's table, from the name that the driver reports: 'NVIDIA H200' -> 'nvidia-h200'."""
    return "-".join(name.lower().replace("/", " ").split())


def is_measured(gpu: str) -> bool:
    """Whether there is a table for that GPU."""
    return bool(_table(gpu))


@cache
def _table(gpu: str) -> dict[str, dict[str, list[tuple[int | None, Tile]]]]:
    path = Path(__file__).parent / "configs" / f"{gpu}.json"
    if not path.exists():
        return {}
    tables = json.loads(path.read_text())["ops"]
    return {op: {key: [(r[0], r[1]) for r in rows] for key, rows in t.items()} for op, t in tables.items()}


@cache
def _say_once(op: str, gpu: str, n: int, k: int) -> None:
    shape = f" for a weight of {n}x{k}" if n else ""
    logger.info("%s: no measured tile on %s%s; a formula chooses", op, gpu, shape)
