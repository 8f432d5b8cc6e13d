"""Ways to cut a product's tiles into programs that a search tries (see kernels/pieces.py)."""

from __future__ import annotations

from collections.abc import Iterator


def cuts(tiles: int, steps: int, cores: int) -> Iterator[dict[str, int]]:
    """Programs that fill 1 to 3 places on each of the cores evenly: all in pieces, or those that are left.

    EARLY 1: the next kernel's programs fill places that are free meanwhile, 2: those that have been left.
    """
    ways = [{"SLOTS": 1, "PIECES": 0}] if tiles >= 0.6 * cores else []
    for slots in (cores, 2 * cores, 3 * cores):
        whole, rest = divmod(tiles, slots)
        if rest == 0 or whole > 3 or rest * steps < 2 * slots:
            continue
        pieces = {slots, slots // rest * rest} if whole == 0 else {cores}
        ways += [{"SLOTS": slots, "PIECES": p} for p in sorted(pieces) if p > rest]
    yield from ({**way, "EARLY": early} for way in ways for early in (1, 2))
