"""Which line to ask next: the longest of a block first, without ever keeping more than two blocks.

Sorted by length a batch runs fuller: requests of one size end together, and the short ones, asked last, fill
the steps in which the long ones run out. Lengths within a fifth of each other count as one, and lines of one
length keep their order, so that answers are written, and safe, early.

The input may be larger than memory, so it is read in blocks; a block is read when the one before has been
asked, and not before the one before that is on disk. Where answers that wait for an earlier line grow large,
lines are asked in their own order until those are written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from qinfer.batch.lines import Line, parse, raw_lines
from qinfer.batch.output import OrderedOutput

BLOCK_BYTES = 64 << 20
HELD_BYTES = 128 << 20


def lines_from(path: Path, first: int) -> Iterator[Line]:
    """The requests of a checked file, without the first `first`."""
    numbered = enumerate(raw_lines(path))
    for place, (number, raw) in islice(numbered, first, None):
        yield parse(raw, place, number)


def _size(line: Line) -> int:
    """A quarter of a power of two: of lengths that are about the same."""
    return round(4 * math.log2(line.tokens() + 1))


class Window:
    """Hands out lines to many workers; `output` says what is on disk already."""

    def __init__(
        self,
        lines: Iterator[Line],
        output: OrderedOutput,
        *,
        block_lines: int,
        block_bytes: int = BLOCK_BYTES,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        self._lines, self._output = lines, output
        self._block_lines, self._block_bytes, self._held_bytes = block_lines, block_bytes, held_bytes
        self._unasked: dict[int, Line] = {}  # in the input's order
        self._by_length: list[int] = []  # places, the longest last
        self._start = output.first  # of the block at hand
        self._written = asyncio.Event()

    async def next(self) -> Line | None:
        """The next line to ask; None after the last."""
        while not self._unasked:
            if self._output.first < self._start:  # the block before is not on disk: wait for it
                self._written.clear()
                await self._written.wait()
                continue
            if not self._read_block():
                return None
        if self._output.held > self._held_bytes:
            return self._unasked.pop(next(iter(self._unasked)))
        while (place := self._by_length.pop()) not in self._unasked:
            pass
        return self._unasked.pop(place)

    def wrote(self) -> None:
        """To be told when `output` may have grown on disk."""
        self._written.set()

    def _read_block(self) -> bool:
        """Reads the next block; whether there was one."""
        size = 0
        for line in islice(self._lines, self._block_lines):
            self._unasked[line.place] = line
            size += line.size
            if size >= self._block_bytes:
                break
        if not self._unasked:
            return False
        self._start = next(iter(self._unasked))
        self._by_length = sorted(self._unasked, key=lambda i: (_size(self._unasked[i]), -i))
        return True
