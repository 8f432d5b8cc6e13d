"""One step's work as plain ints: what the scheduler says and the runner obeys. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from qinfer.engine.options import StepLimits

_FINE, _COARSE, _FINE_UP_TO = 8, 16, 256  # steps between sizes of decode steps
_MIXED, _MIXED_UP_TO = 64, 1024  # tokens of steps with prompts; longer ones take the device longer than the host


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


class Shape(NamedTuple):
    """To what a step is padded."""

    num_tokens: int
    num_seqs: int


def shape_of(num_tokens: int, num_seqs: int, limits: StepLimits, *, decodes: bool) -> Shape | None:
    """Of a step of so many tokens, which `decodes` one token of each sequence or not; None: not padded."""
    if decodes:
        return Shape(*[bucket(num_seqs, limits.max_num_seqs)] * 2)
    padded = -(-num_tokens // _MIXED) * _MIXED
    return Shape(padded, limits.max_num_seqs) if padded <= _mixed_up_to(limits) else None


def shapes(limits: StepLimits) -> list[Shape]:
    """All shapes of padded steps, the largest first."""
    mixed = range(_MIXED, _mixed_up_to(limits) + 1, _MIXED)
    found = [Shape(num_tokens, limits.max_num_seqs) for num_tokens in mixed]
    return sorted([*found, *(Shape(n, n) for n in buckets(limits.max_num_seqs))], reverse=True)


def _mixed_up_to(limits: StepLimits) -> int:
    return min(_MIXED_UP_TO, -(-limits.max_num_batched_tokens // _MIXED) * _MIXED)


def bucket(count: int, largest: int) -> int:
    """The size to which a decode step of `count` sequences is padded, at most `largest`."""
    if count > _FINE // 2:
        step = _FINE if count <= _FINE_UP_TO else _COARSE
        size = -(-count // step) * step
    else:
        size = 1 << (count - 1).bit_length()
    return min(size, largest)


def buckets(largest: int) -> list[int]:
    """All sizes of decode steps, the largest first."""
    return sorted({bucket(count, largest) for count in range(1, largest + 1)}, reverse=True)
