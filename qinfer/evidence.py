"""The two streams of evidence on a candidate: held-out text and questions of tasks.

Both ask the source first and keep what it says, so that it is asked once for all candidates, and keep what
the candidate says, so that a run that was stopped goes on where it was. Text is read window by window through
the engine that serves. Questions are put to an engine with continuous batching, in blocks of a few of one
task; blocks of all tasks take turns in proportion to their sizes, so that a part of the questions is a fair
sample of all.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import NamedTuple

from qinfer.backend import model_device
from qinfer.checkpoint.files import read_json
from qinfer.engine.options import EngineOptions
from qinfer.evals import fidelity, paired
from qinfer.evals.answers import Pair
from qinfer.evals.gate import MIN_WINDOWS, Measure
from qinfer.evals.items import Item, pair
from qinfer.evals.scorer import Scorer
from qinfer.evals.statistics import CONFIDENCE
from qinfer.evals.store import Store, key_of
from qinfer.evals.tasks import Task
from qinfer.evals.thresholds import Limits
from qinfer.reading import Bar, Reader, engine_for, scores_of

BLOCK = 16  # questions that are kept together
_AT_ONCE = 8  # blocks of one task that are asked together
_CPU_POOL_TOKENS = 32_768  # in the KV cache: prefixes worth keeping, not all of the memory that is free
_LEAST_QUESTIONS = 64  # below which nobody looks at a part of them


class TextStream:
    """Windows of held-out text, read by both models."""

    name, unit = "held-out text", "windows"

    def __init__(
        self,
        reference: Reader,
        candidate: Reader,
        windows: Sequence[Sequence[int]],
        limits: Limits,
        store: Store,
        *,
        seed: int,
        bar: Bar,
    ) -> None:
        self._readers = reference, candidate
        self._windows = windows
        self._limits = limits
        self._store = store
        self._seed = seed
        self._bar = bar
        self.scores: list[fidelity.WindowScores] = []
        self.size = len(windows)
        self.least = min(MIN_WINDOWS, len(windows))

    def extend(self, upto: int) -> int:
        """Reads on until so many windows are scored; both models are unloaded then."""
        fresh = self._windows[len(self.scores) : upto]
        self.scores += scores_of(*self._readers, fresh, self._store, self._bar)
        for reader in self._readers:
            reader.unload()
        return len(self.scores)

    def measures(self, confidence: float) -> tuple[Measure, ...]:
        """What is judged, then what is reported."""
        if not self.scores:
            return ()
        return fidelity.measures(self.scores, self._limits, seed=self._seed, confidence=confidence)

    def silence(self) -> str:
        """Text always says something."""
        return ""


class _Block(NamedTuple):
    task: Task
    item_ids: tuple[int, ...]


class TaskStream:
    """Questions of tasks, answered by both models."""

    name, unit = "tasks", "questions"

    def __init__(
        self,
        source: Answerer,
        candidate: Answerer,
        tasks: Sequence[Task],
        accuracy_lost: float,
        *,
        limit: int | None,
        seed: int,
    ) -> None:
        self._answerers = source, candidate
        self._blocks = blocks_of(tasks, limit)
        self._accuracy_lost = accuracy_lost
        self._seed = seed
        self._next = 0
        self.pairs: list[Pair] = []
        self.size = sum(len(block.item_ids) for block in self._blocks)
        self.least = min(_LEAST_QUESTIONS, self.size)

    def extend(self, upto: int) -> int:
        """Asks on, whole blocks, until so many questions are answered: the source, then the candidate."""
        fresh: list[_Block] = []
        done = len(self.pairs)
        while done < upto:
            fresh.append(self._blocks[self._next])
            done += len(fresh[-1].item_ids)
            self._next += 1
        ours, theirs = (answerer.answers(fresh) for answerer in self._answerers)
        self.pairs += pair(ours, theirs)
        return len(self.pairs)

    def measures(self, confidence: float) -> tuple[Measure, ...]:
        """What is judged, then what is reported; nothing where the source is no better than chance."""
        return paired.measures(self.pairs, self._accuracy_lost, seed=self._seed, confidence=confidence)

    def silence(self) -> str:
        """Why there is nothing to judge."""
        return "the source is no better than chance on any of them: leave them out, or name others"

    def results(self, confidence: float = CONFIDENCE) -> list[paired.TaskResult]:
        """Task by task."""
        return paired.task_results(self.pairs, seed=self._seed, confidence=confidence)


class Answerer:
    """A model that is asked questions; it is loaded when one comes that it has not answered before."""

    def __init__(self, reader: Reader, store: Store, *, progress: bool) -> None:
        """`reader` says which model, and how it is run."""
        self._reader = reader
        self._store = store
        self._progress = progress
        self._scorer: Scorer | None = None
        self._digests: dict[str, str] = {}

    def answers(self, blocks: Sequence[_Block]) -> list[Item]:
        """Records of all questions of the blocks, in order; the model is unloaded afterwards."""
        keys = [self._key(block) for block in blocks]
        found: dict[int, list[Item]] = {}
        missing: dict[str, list[int]] = {}
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            data = self._store.get(key)
            if data is None:
                missing.setdefault(block.task.name, []).append(i)
            else:
                found[i] = [Item.from_dict(record) for record in json.loads(data)]
        portions = [part for of_task in missing.values() for part in _batched(of_task, _AT_ONCE)]
        for portion in Bar(self._progress, "portion")(portions, f"questions to {self._reader.model.name}"):
            items = iter(self._ask([blocks[i] for i in portion]))
            for i in portion:
                found[i] = [next(items) for _ in blocks[i].item_ids]
                self._store.put(keys[i], json.dumps([item.to_dict() for item in found[i]]).encode())
        self.unload()
        return [item for i in range(len(blocks)) for item in found[i]]

    def scorer(self) -> Scorer:
        """The model in an engine that answers many questions at once."""
        if self._scorer is None:
            model = self._reader.model
            blocks = max(model.checkpoint.config.context_len, _CPU_POOL_TOKENS) // 16
            options = EngineOptions(num_kv_blocks=blocks if model_device().type == "cpu" else None)
            engine = engine_for(model.checkpoint, self._reader.serving, options, model.tokenizer)
            self._scorer = Scorer(engine, model.tokenizer, repetition_penalty=self._repetition_penalty())
        return self._scorer

    def unload(self) -> None:
        """Frees the model."""
        self._scorer = None
        gc.collect()

    def _ask(self, blocks: Sequence[_Block]) -> list[Item]:
        """Of one task."""
        return blocks[0].task.ask(self.scorer(), [i for block in blocks for i in block.item_ids])

    def _repetition_penalty(self) -> float:
        """What the model's own generation_config.json asks for."""
        file = self._reader.model.checkpoint.path / "generation_config.json"
        config = read_json(file) if file.is_file() else {}
        return float(config.get("repetition_penalty") or 1.0)

    def _key(self, block: _Block) -> str:
        name = block.task.name
        if name not in self._digests:
            self._digests[name] = block.task.digest()
        return key_of(
            kind="answers",
            reader=self._reader.identity,
            repetition_penalty=self._repetition_penalty(),
            task=[name, self._digests[name]],
            items=block.item_ids,
        )


def _batched(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def blocks_of(tasks: Sequence[Task], limit: int | None = None) -> list[_Block]:
    """The first `limit` questions of each task (None: all) in blocks, tasks in turn by their sizes."""
    placed: list[tuple[float, int, _Block]] = []
    for order, task in enumerate(tasks):
        size = min(len(task), limit or len(task))
        for start in range(0, size, BLOCK):
            item_ids = tuple(range(start, min(start + BLOCK, size)))
            placed.append(((start + len(item_ids) / 2) / size, order, _Block(task, item_ids)))
    return [block for _, _, block in sorted(placed, key=lambda entry: entry[:2])]
