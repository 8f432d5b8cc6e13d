"""One step's work as plain ints: what the scheduler says and the runner obeys. No torch."""

from typing import NamedTuple


class Chunk(NamedTuple):
    """Tokens [start, stop) of one sequence, run in one step; decode is a chunk of length one."""

    seq_id: int
    start: int
    stop: int
    pages: tuple[int, ...]  # of the whole sequence up to stop
    sample: bool  # stop reaches the sequence's end, so its last row is sampled


class StepPlan(NamedTuple):
    """All chunks of one step, in scheduling order."""

    chunks: tuple[Chunk, ...]
