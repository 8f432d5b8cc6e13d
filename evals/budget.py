"""How much is measured: all of it, or as much as a budget of time allows, where it decides most.

Evidence comes in streams, cheap ones first: windows of held-out text, questions of tasks. Without a budget
each is measured to its end and judged once, for a report that leaves nothing out. With one, it is measured in
stages. After each stage the stream is looked at; what is decided is left alone, one failure ends it all, and
the time goes to the stream that will be decided soonest, by what its own interval and its own speed say.

Who looks often sees a chance result sooner or later. So the looks of a stream are few and share the error
that one look may have: 1 % at a quarter, 2 % at the half, 7 % at the end, which is 10 % in all, half of it on
either side. A stage that the budget cut short is judged as strictly as the look it was on the way to.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from qinfer.errors import UserError
from qinfer.evals.gate import Measure, Verdict
from qinfer.evals.paired import needed
from qinfer.evals.statistics import CONFIDENCE

_NUMBER = r"\d+(?:\.\d+)?"
_TIME = re.compile(rf"(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s?)?")


class Look(NamedTuple):
    """A moment at which a stream is judged: at this share of its size, with that confidence."""

    share: float
    confidence: float


LOOKS = (Look(0.25, 0.99), Look(0.5, 0.98), Look(1.0, 0.93))


class Stream(Protocol):
    """Evidence of one kind that is measured bit by bit."""

    @property
    def name(self) -> str:
        """For a person: "held-out text"."""
        ...

    @property
    def unit(self) -> str:
        """What is counted, in the plural."""
        ...

    @property
    def size(self) -> int:
        """Units that there are."""
        ...

    @property
    def least(self) -> int:
        """Units below which nothing can be judged."""
        ...

    def extend(self, upto: int) -> int:
        """Measures until so many units are done, or a few more; returns how many are."""
        ...

    def measures(self, confidence: float) -> tuple[Measure, ...]:
        """What the units done so far say."""
        ...

    def silence(self) -> str:
        """Why they say nothing, where they do not."""
        ...


class Spent(NamedTuple):
    """What a stream got."""

    name: str
    unit: str
    done: int
    size: int
    seconds: float
    confidence: float  # of the intervals of its measures
    needed: int | None  # units in all that would decide it; None: it is decided, or no number would
    silence: str  # why it says nothing; "" where it says something

    def to_text(self) -> str:
        """One line, for a person who wonders what is missing."""
        line = f"{self.name}: {self.done} of {self.size} {self.unit}"
        line += f"; {self.silence}" if self.silence else ""
        return line if self.needed is None else f"{line}; about {self.needed} would decide it"


class Evidence(NamedTuple):
    """All measures, what they cost, and which streams say neither yes nor no."""

    measures: tuple[Measure, ...]
    spent: tuple[Spent, ...]
    open: tuple[str, ...]


class _State:
    """A stream with what is known of it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.done = 0
        self.seconds = 0.0
        self.measures: tuple[Measure, ...] = ()
        self.confidence = CONFIDENCE
        self.out_of_time = False

    @property
    def verdict(self) -> Verdict:
        """UNDECIDED also where nothing can be judged."""
        verdicts = {measure.verdict for measure in self.measures} - {None}
        if Verdict.FAIL in verdicts:
            return Verdict.FAIL
        return Verdict.PASS if verdicts == {Verdict.PASS} else Verdict.UNDECIDED

    @property
    def may_go_on(self) -> bool:
        """Whether more of it could change anything."""
        left = self.done < self.stream.size and not self.out_of_time
        return left and self.verdict is Verdict.UNDECIDED

    @property
    def needed(self) -> int | None:
        """Units in all that would decide its undecided measures."""
        wanted = [needed(m, self.done) for m in self.measures if m.verdict is Verdict.UNDECIDED]
        known = [units for units in wanted if units is not None]
        return max(known) if known and len(known) == len(wanted) else None

    def urgency(self) -> tuple[int, float]:
        """The smaller, the sooner it is decided; what has not been looked at comes first."""
        if not self.measures:
            return (0, 0.0)
        units = self.needed
        if units is None or units > self.stream.size:  # its end will not decide it, as it looks now
            return (2, self.stream.size - self.done)
        return (1, (units - self.done) * self.seconds / self.done)

    def next_look(self) -> tuple[int, Look]:
        """Where it is judged next: units done by then, and how."""
        for look in LOOKS:
            units = min(self.stream.size, max(self.stream.least, math.ceil(look.share * self.stream.size)))
            if units > self.done or look is LOOKS[-1]:
                return units, look
        raise AssertionError("the last look is at the end")

    def extend(self, upto: int, clock: Callable[[], float]) -> None:
        start = clock()
        self.done = self.stream.extend(upto)
        self.seconds += clock() - start

    def look(self, confidence: float) -> None:
        """With fewer units than can be judged only what is no number is: an interval of two is a guess."""
        self.confidence = confidence
        enough = self.done >= self.stream.least
        self.measures = tuple(
            measure._replace(
                confidence=confidence,
                limit=measure.limit if enough or not math.isfinite(measure.interval.value) else None,
            )
            for measure in self.stream.measures(confidence)
        )

    def spent(self) -> Spent:
        """For the record."""
        stream, undecided = self.stream, self.verdict is Verdict.UNDECIDED
        silent = bool(self.done) and not self.measures
        return Spent(
            stream.name,
            stream.unit,
            self.done,
            stream.size,
            self.seconds,
            self.confidence,
            self.needed if undecided else None,
            stream.silence() if silent else "",
        )


def parse_budget(text: str) -> float:
    """Seconds of "90s", "10m", "1h30m" or "600"; raises UserError for anything else, and for none."""
    found = _TIME.fullmatch(text.strip().lower())
    parts = [float(part or 0) for part in found.groups()] if found else []
    seconds = sum(part * size for part, size in zip(parts, (3600, 60, 1), strict=True)) if parts else 0
    if seconds <= 0:
        raise UserError(f"a budget is a time such as 90s, 10m or 1h30m, not {text!r:.100}", "budget")
    return seconds


def gather(
    streams: Sequence[Stream], seconds: float | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Evidence:
    """Measures the streams, given cheapest first, for about so many seconds (None: to the end)."""
    states = [_State(stream) for stream in streams]
    if seconds is None:
        _to_the_end(states, clock)
    else:
        _in_stages(states, clock() + seconds, clock)
    failed = any(state.verdict is Verdict.FAIL for state in states)
    unsettled = [state for state in states if state.verdict is Verdict.UNDECIDED]
    return Evidence(
        tuple(measure for state in states for measure in state.measures),
        tuple(state.spent() for state in states),
        () if failed else tuple(state.spent().to_text() for state in unsettled),
    )


def _to_the_end(states: Sequence[_State], clock: Callable[[], float]) -> None:
    for state in states:
        state.extend(state.stream.size, clock)
        state.look(CONFIDENCE)


def _in_stages(states: Sequence[_State], deadline: float, clock: Callable[[], float]) -> None:
    while open_ones := [state for state in states if state.may_go_on]:
        state = min(open_ones, key=_State.urgency)
        upto, look = state.next_look()
        if clock() >= deadline and state is not states[0]:
            state.out_of_time = True
            continue
        if not state.done:  # how fast is it?
            state.extend(min(upto, max(1, state.stream.least // 4)), clock)
        affordable = math.floor((deadline - clock()) / max(state.seconds / state.done, 1e-9))
        reached = min(upto, state.done + affordable)
        if reached <= state.done < upto:
            state.out_of_time = True
        elif reached > state.done:
            state.out_of_time = reached < upto
            state.extend(reached, clock)
        state.look(look.confidence)
        if state.verdict is Verdict.FAIL:
            return
