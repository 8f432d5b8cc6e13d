"""How deep JSON is nested, found out level by level: recursion would end in an error of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEAVES = (str, int, float, type(None))  # known at once: bodies hold lists of a million tokens


def is_deeper(value: Any, levels: int) -> bool:
    """Whether more than `levels` objects and lists lie within each other."""
    level = _containers([value])
    for _ in range(levels):
        if not level:
            return False
        level = [inner for one in level for inner in _containers(one)]
    return bool(level)


def _containers(within: Mapping[str, Any] | list[Any]) -> list[Any]:
    values = within.values() if isinstance(within, Mapping) else within
    return [value for value in values if not isinstance(value, _LEAVES) and isinstance(value, Mapping | list)]
