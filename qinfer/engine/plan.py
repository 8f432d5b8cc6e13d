"""One step's work as plain ints: what the scheduler says and the runner obeys. No torch."""

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Tokens [start, stop) of one sequence, run in one step; decode is a chunk of length one.

    A running sequence has a lane to itself, where the runner keeps its pages and its last sampled token.
    """

    seq_id: int
    start: int
    stop: int
    pages: Sequence[int]  # of the sequence, at least up to stop; the list goes on growing with it
    sample: bool  # stop reaches the sequence's end, so its last row is sampled
    lane: int = 0  # below max_num_seqs
    pending: bool = False  # its one token is what the lane's step before samples: nobody knows it yet
    new_pages: bool = True  # not those of the lane's chunk before: some came on, or all are others


class StepPlan(NamedTuple):
    """All chunks of one step, in scheduling order."""

    chunks: tuple[Chunk, ...]
