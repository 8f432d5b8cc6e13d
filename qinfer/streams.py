"""The evidence of one comparison, made of its models and of what they are to read and answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qinfer.dtypes import name_of
from qinfer.evals import fidelity
from qinfer.evals.answers import Pair
from qinfer.evals.budget import Stream
from qinfer.evals.gate import Measure
from qinfer.evals.paired import TaskResult
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task
from qinfer.evals.thresholds import Limits
from qinfer.evidence import Answerer, TaskStream, TextStream
from qinfer.reading import Bar, Reader, Serving, scores_of

if TYPE_CHECKING:
    from qinfer.compare import Comparison

FLOOR_WINDOWS = 8  # the first ones, for the noise floor


class Streams:
    """The evidence of one comparison."""

    def __init__(
        self,
        comparison: Comparison,
        limits: Limits,
        windows: Sequence[Sequence[int]],
        tasks: Sequence[Task],
        store: Store,
        progress: bool,
    ) -> None:
        source, serving, seed = comparison.source, comparison.serving, comparison.seed
        length = max(map(len, windows))
        self._reference = Reader(source, comparison.reference, length, store)
        self._candidate = Reader(comparison.candidate, serving, length)
        self._alike = Reader(source, Serving(serving.dtype, name_of(serving.dtype)), length)
        self._windows, self._store, self._bar, self._seed = windows, store, Bar(progress), seed
        self.text = TextStream(
            self._reference, self._candidate, windows, limits, store, seed=seed, bar=self._bar
        )
        self._tasks: TaskStream | None = None
        if comparison.questions and tasks:
            self._tasks = TaskStream(
                Answerer(self._alike, store, progress=progress),
                Answerer(self._candidate, store, progress=progress),
                tasks,
                limits.accuracy_lost,
                limit=comparison.questions.limit,
                seed=seed,
            )

    @property
    def all(self) -> list[Stream]:
        """Cheap ones first."""
        return [self.text, *([] if self._tasks is None else [self._tasks])]

    @property
    def pairs(self) -> list[Pair]:
        """Answers to all questions that were asked."""
        return [] if self._tasks is None else self._tasks.pairs

    def results(self) -> list[TaskResult]:
        """Task by task."""
        return [] if self._tasks is None else self._tasks.results()

    def noise_floor(self) -> tuple[Measure, ...]:
        """What the serving dtype alone changes, where it is not the reference's."""
        windows = self._windows[: min(FLOOR_WINDOWS, len(self.text.scores))]
        if self._alike.serving.dtype == self._reference.serving.dtype or not windows:
            return ()
        floor = scores_of(self._reference, self._alike, windows, self._store, self._bar)
        return fidelity.noise_floor(floor, seed=self._seed)
