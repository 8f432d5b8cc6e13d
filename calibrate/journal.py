"""What a run has finished, so that it can be killed at any moment and go on: `OUT.partial/.journal/`.

    begun.json             all that decides a bit of the result: weights, recipe, text, seeds, versions
    layers.jsonl           a line for each finished layer: its report, the pieces of file that hold it, and
                           checksums of the states after it and of the line itself
    states-00007.draft/    the residual streams of all sequences before layer 7, as those before left them

A layer counts once its line is whole. Its tensors and the states after it are on the disk before the line is
written, and the states before it are deleted afterwards, so at each moment there is all that the next layer
needs. It then meets the very numbers that it would have met without the interruption, and the result is the
same to the last bit.

Only the command that began may go on. Another one is told what differs, and deletes nothing; so is one that
finds the journal damaged, since a byte changed here would change the result.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qinfer.calibrate.block import Batch
from qinfer.calibrate.report import LayerReport
from qinfer.checkpoint.files import empty, read_json, write_json
from qinfer.checkpoint.shard_writer import Piece
from qinfer.errors import CheckpointError, UserError

FOLDER = ".journal"
_BEGUN, _LAYERS = "begun.json", "layers.jsonl"
_ANEW = "begin anew with --no-resume (resume=False)"
_STRETCH = 1 << 20  # bytes of a file looked at together
_MAY_DIFFER = "mix"  # of a run that raises units step by step: the step before is of no use

States = Mapping[str, Sequence[Batch]]  # "hidden", in the batches' order


class Journal:
    """Layers finished so far, in order: `done` reports, `pieces` of file."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Opens the journal below `folder`, or begins one there.

        Raises UserError where one was begun by another command (see `check_same`), CheckpointError naming
        a file of it that is damaged.
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
        kept = _save_states(self._states(number), states) if not last and any(states.values()) else {}
        row = {"report": asdict(report), "pieces": pieces[len(self.pieces) :], "states": kept}
        with (self._folder / _LAYERS).open("a", encoding="utf-8") as stream:
            stream.write(_line(row))
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
        """Whole lines; what a killed process left behind them, half a line or states, is removed.

        CheckpointError, with nothing changed, naming a line or file of states that is not as it was written.
        """
        file = self._folder / _LAYERS
        written = file.read_bytes()
        *lines, half = written.split(b"\n")
        rows = [_row(line, f"{file}, line {number},") for number, line in enumerate(lines, 1)]
        for row in rows:
            self.done.append(LayerReport(**row["report"]))
            self.pieces += [Piece(name, tuple(names), size) for name, names, size in row["pieces"]]
        states = self._states(len(self.done))
        for name, checksum in rows[-1]["states"].items():
            if not (states / name).is_file() or _checksum(states / name) != checksum:
                raise _damaged(str(states / name))
        os.truncate(file, len(written) - len(half))
        for other in self._folder.glob("states-*"):
            if other != states:
                shutil.rmtree(other)


def finished_layers(folder: Path) -> int:
    """How many layers the journal below `folder` holds; 0 where there is none."""
    file = folder / FOLDER / _LAYERS
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def check_same(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the journal below `folder` was begun by this command; False where its work is of no use.

    Raises UserError, naming what differs, where it was another command that could still go on;
    CheckpointError where it cannot be read.
    """
    if not finished_layers(folder):
        return False
    try:
        begun = read_json(folder / FOLDER / _BEGUN)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: {_ANEW}") from error
    before, now = _flat(begun), _flat(_plain(identity))
    different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    serious = [name for name in different if not name.startswith(_MAY_DIFFER)]
    if not serious:
        return not different
    was, now_is = (f"{json.dumps(values.get(serious[0])):.80}" for values in (before, now))
    raise UserError(
        f"{folder} holds the unfinished work of another command ({serious[0]} was {was}, is now {now_is}): "
        f"run that command to finish it, or {_ANEW}",
        "resume",
    )


def _save_states(folder: Path, states: States) -> dict[str, int]:
    """Writes the files of a folder, which appears whole; returns their checksums by name."""
    draft = folder.with_suffix(".part")
    draft.mkdir()
    checksums = {}
    for name, batches in states.items():
        for i, batch in enumerate(batches):
            file = draft / f"{name}.{i}"
            batch.slot.save(file)
            checksums[file.name] = _checksum(file)
    draft.rename(folder)
    return checksums


def _checksum(file: Path) -> int:
    """CRC-32 of what is in a file."""
    checksum = 0
    with file.open("rb") as stream:
        while stretch := stream.read(_STRETCH):
            checksum = zlib.crc32(stretch, checksum)
    return checksum


def _line(row: Mapping[str, Any]) -> str:
    """A row with its own checksum, which `_row` verifies."""
    return json.dumps({**row, "checksum": zlib.crc32(json.dumps(row).encode())}) + "\n"


def _row(line: bytes, place: str) -> dict[str, Any]:
    """What `_line` wrote; CheckpointError naming the place where a byte of it is another."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _damaged(place) from None
    if not isinstance(row, dict) or "checksum" not in row:
        raise _damaged(place)
    del row["checksum"]
    if _line(row).encode() != line + b"\n":
        raise _damaged(place)
    return row


def _damaged(place: str) -> CheckpointError:
    return CheckpointError(f"{place} is damaged, and what was begun may not go on: {_ANEW}")


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
