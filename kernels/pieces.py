"""How the output tiles of a product are shared out among programs so that all end together; without a GPU.

4096 rows of weight in tiles of 128 are 32 tiles, and an H200 has 132 multiprocessors, which hold two such
programs each. So tiles are cut along the inputs. Laid end to end, tile after tile, their steps along the
inputs are a line; a piece is a stretch of it, from one tile or from two, and all pieces are equally long.
Where there are more tiles than places for programs, those that fill all places stay whole, one a program, and
only the others are cut. The idea is that of stream-K (Osama et al., 2023).

The sums of pieces go to a workspace, and a small kernel adds them in their order (pieces_triton.py): the same
inputs give the same bits. That takes about 2 us, so a search decides. 224 tiles of a weight of 28672 rows
leave 40 of 264 places empty, and are still faster whole.
"""

from __future__ import annotations

from typing import NamedTuple

from qinfer.kernels.tiles import Declined

MOST = 16  # pieces of a tile, roughly: more would be slow to add


class Cut(NamedTuple):
    """Programs 0 .. whole - 1 have a tile each; the next `pieces` share the tiles from `whole` on."""

    whole: int
    pieces: int

    @property
    def programs(self) -> int:
        return self.whole + self.pieces

    def equal_parts(self, tiles: int, steps: int) -> int:
        """Of each tile, where all are cut into as many equally long pieces; else 0."""
        parts = self.pieces // tiles
        return parts if self.pieces and parts * tiles == self.pieces and steps % parts == 0 else 0


def cut(tiles: int, steps: int, slots: int, pieces: int) -> Cut:
    """A multiple of `slots` tiles whole, the others in `pieces` if that is more than they are.

    Raises Declined where the steps of all tiles are more than 31 bits count.
    """
    if tiles * steps >= 1 << 31:
        raise Declined(f"{tiles} tiles of output in {steps} steps are more than 31 bits count")
    whole = tiles // slots * slots
    rest = tiles - whole
    pieces = min(pieces, MOST * rest, rest * steps)
    return Cut(whole, pieces) if pieces > rest else Cut(tiles, 0)
