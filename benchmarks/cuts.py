"""Ways to cut a product's tiles into programs that a search tries (see kernels/pieces.py)."""

from __future__ import annotations

from collections.abc import Iterator


def cuts(tiles: int, steps: int, cores: int) -> Iterator[dict[str, int]]:
    """Programs that fill 1 to 4 places on each of the cores evenly: all in pieces, or those that are left."""
    if tiles >= 0.6 * cores:
        yield {"SLOTS": 1, "PIECES": 0}
    for slots in (cores, 2 * cores, 3 * cores, 4 * cores):
        whole, rest = divmod(tiles, slots)
        if rest == 0 or whole > 6 or rest * steps < 2 * slots:
            continue
        pieces = {slots, slots // rest * rest} if whole == 0 else {slots, cores}
        yield from ({"SLOTS": slots, "PIECES": p} for p in sorted(pieces) if p > rest)
