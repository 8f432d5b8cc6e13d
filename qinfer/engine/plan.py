"""One step's work as plain ints: what the scheduler says and the runner obeys. No torch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qinfer.engine.options import StepLimits

_FINE, _COARSE, _FINE_UP_TO = 8, 16, 256  # steps between sizes of decode steps
GRAPHED = 1024  # tokens: steps with prompts have graphs up to here where they may be so long
_MIXED, _LONG, _LONG_UP_TO = 64, 256, 2048  # steps between sizes of those, of longer ones, and their end
_FEW = 16  # sequences of the smaller of their shapes


class Chunk(NamedTuple):
    """Tokens [start, stop) of one sequence, run in one step; decode is a chunk of length one.

    A running sequence has a lane to itself, where the runner keeps its pages and its last sampled token.
    """

    seq_id: int
    start: int
    stop: int
    sample: bool  # stop reaches the sequence's end, so its last row is sampled
    lane: int = 0  # below max_num_seqs
    pending: bool = False  # its one token is what the lane's step before samples: nobody knows it yet


class StepPlan(NamedTuple):
    """All chunks of one step, in scheduling order.

    `pages` of a lane are its sequence's, at least up to stop. They are given where some came on, or all are
    others, and stand until then. A list goes on growing with its sequence.
    """

    chunks: tuple[Chunk, ...]
    pages: Mapping[int, Sequence[int]]


class Shape(NamedTuple):
    """To what a step is padded: as many tokens as sequences in decode, else more."""

    num_tokens: int
    num_seqs: int

    @property
    def decodes(self) -> bool:
        """Whether it is of steps of one token for each sequence."""
        return self.num_tokens == self.num_seqs


def shape_of(num_tokens: int, num_seqs: int, limits: StepLimits, *, decodes: bool) -> Shape | None:
    """Of a step of so many tokens, which `decodes` one token of each sequence or not; None: not padded."""
    if decodes:
        size = bucket(num_seqs, limits.max_num_seqs)
        return Shape(size, size)
    room = next(room for room in _rooms(limits) if num_seqs <= room)
    padded = _rounded_up(max(num_tokens, room + 1))
    return Shape(padded, room) if padded <= _mixed_up_to(limits) else None


def shapes(limits: StepLimits) -> list[Shape]:
    """All shapes of padded steps, the largest first."""
    found = [Shape(size, size) for size in buckets(limits.max_num_seqs)]
    for room in _rooms(limits):
        least, most = _rounded_up(room + 1), _mixed_up_to(limits)
        sizes = *range(_MIXED, GRAPHED, _MIXED), *range(GRAPHED, most + 1, _LONG)
        found += [Shape(num_tokens, room) for num_tokens in sizes if least <= num_tokens <= most]
    return sorted(found, reverse=True)


def _rooms(limits: StepLimits) -> list[int]:
    """For how many sequences steps with prompts have room."""
    return sorted({min(_FEW, limits.max_num_seqs), limits.max_num_seqs})


def _mixed_up_to(limits: StepLimits) -> int:
    """The longest padded step: it keeps its peak, so beyond GRAPHED it is a small part of the longest step.

    A host launches the kernels of a step one by one in the time that 2,000 tokens of an 8B model take.
    """
    longest = limits.max_num_batched_tokens
    return max(min(GRAPHED, _rounded_up(longest)), min(_LONG_UP_TO, longest // 4 // _LONG * _LONG))


def _rounded_up(num_tokens: int) -> int:
    step = _MIXED if num_tokens <= GRAPHED else _LONG
    return -(-num_tokens // step) * step


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
