"""What a run has finished, so that it can be killed at any moment and go on: `OUT.partial/.journal/`.

    begun.json             all that decides a bit of the result: weights, recipe, text, seeds, versions
    layers.jsonl           a line for each finished layer: its report and the pieces of file that hold it
    states-00007.draft/    the residual streams of all sequences before layer 7, as those before left them

A layer counts once its line is whole. Its tensors and the states after it are on the disk before the line is
written, and the states before it are deleted afterwards, so at each moment there is all that the next layer
needs. It then meets the very numbers that it would have met without the interruption, and the result is the
same to the last bit.

Only the command that began may go on. Another one is told what differs, and deletes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qinfer.calibrate.block import Batch
from qinfer.calibrate.report import LayerReport
from qinfer.checkpoint.files import empty, read_json, write_json
from qinfer.checkpoint.shard_writer import Piece
from qinfer.errors import UserError

FOLDER = ".journal"
_BEGUN, _LAYERS = "begun.json", "layers.jsonl"
_MAY_DIFFER = "mix"  # of a run that raises units step by step: the step before is of no use

States = Mapping[str, Sequence[Batch]]  # "hidden", in the batches' order


class Journal:
    """Layers finished so far, in order: `done` reports, `pieces` of file."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Opens the journal below `folder`, or begins one there.

        Raises UserError where one was begun by another command (see `check_same`).
        """
        self._folder = folder / FOLDER
        self.done: list[LayerReport] = []
        self.pieces: list[Piece] = []
        identity = _plain(identity)
        if self._folder.is_dir() and check_same(folder, identity):
            self._read()
            return
        if folder.exists():
            empty(folder)
        self._folder.mkdir(parents=True)
        write_json(self._folder / _BEGUN, identity)

    def record(self, report: LayerReport, pieces: Sequence[Piece], states: States, *, last: bool) -> None:
        """Notes that a layer is finished; after the `last` one no states are kept.

        `pieces` are all that the writer has committed.
        """
        number = len(self.done) + 1
        if not last and any(states.values()):
            _save_states(self._states(number), states)
        row = {"report": asdict(report), "pieces": pieces[len(self.pieces) :]}
        with (self._folder / _LAYERS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        shutil.rmtree(self._states(number - 1), ignore_errors=True)  # what stays of it goes with the journal
        self.done.append(report)
        self.pieces = list(pieces)

    def restore(self, states: States, *, last: bool) -> None:
        """Puts the batches where the finished layers left them; not after the `last`, where none goes on."""
        if last or not self.done or not any(states.values()):
            return
        folder = self._states(len(self.done))
        for name, batches in states.items():
            for i, batch in enumerate(batches):
                batch.slot.restore(folder / f"{name}.{i}")

    def _states(self, number: int) -> Path:
        return self._folder / f"states-{number:05d}.draft"

    def _read(self) -> None:
        """Whole lines; what a killed process left behind them, half a line or states, is removed."""
        file = self._folder / _LAYERS
        whole = 0
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            self.done.append(LayerReport(**row["report"]))
            self.pieces += [Piece(name, tuple(names), size) for name, names, size in row["pieces"]]
            whole += len(line)
        if file.exists():
            os.truncate(file, whole)
        for other in self._folder.glob("states-*"):
            if other != self._states(len(self.done)):
                shutil.rmtree(other)


def finished_layers(folder: Path) -> int:
    """How many layers the journal below `folder` holds; 0 where there is none."""
    file = folder / FOLDER / _LAYERS
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def check_same(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the journal below `folder` was begun by this command; False where its work is of no use.

    Raises UserError, naming what differs, where it was another command that could still go on.
    """
    if not finished_layers(folder):
        return False
    before, now = (_flat(read_json(folder / FOLDER / _BEGUN)), _flat(_plain(identity)))
    different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    serious = [name for name in different if not name.startswith(_MAY_DIFFER)]
    if not serious:
        return not different
    was, now_is = (f"{json.dumps(values.get(serious[0])):.80}" for values in (before, now))
    raise UserError(
        f"{folder} holds the unfinished work of another command ({serious[0]} was {was}, is now {now_is}): "
        "run that command to finish it, or begin anew with --no-resume (resume=False)",
        "resume",
    )


def _save_states(folder: Path, states: States) -> None:
    draft = folder.with_suffix(".part")
    draft.mkdir()
    for name, batches in states.items():
        for i, batch in enumerate(batches):
            batch.slot.save(draft / f"{name}.{i}")
    draft.rename(folder)


def _plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    plain = json.loads(json.dumps(identity))
    assert isinstance(plain, dict)
    return plain


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What lies in mappings of it by the name of both."""
    flat: dict[str, Any] = {}
    for name, value in identity.items():
        inner = (
            {f"{name} {key}": of for key, of in value.items()} if isinstance(value, dict) else {name: value}
        )
        flat |= inner
    return flat
