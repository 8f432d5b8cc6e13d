"""Writing a model's tensors in shards with an index, so that what is on the disk is whole at any moment."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qinfer.checkpoint.files import write_json
from qinfer.checkpoint.shards import INDEX, ITEM_BYTES, SINGLE
from qinfer.errors import CheckpointError

MAX_SHARD_BYTES = 2 * 1000**3  # also the most that a writer keeps in memory
_STRETCH = 1 << 24  # bytes copied at a time


class Piece(NamedTuple):
    """Tensors that lie in one draft file, and their bytes; JSON keeps it as a list."""

    file: str
    names: tuple[str, ...]
    num_bytes: int


class ShardWriter:
    """Writes tensors as model.safetensors, or as several shards and an index when they are too many.

    Tensors gather in memory, at most `max_shard_bytes` of them (more if one is larger), and go to disk in
    pieces: when they are that many, or when `commit` says that what there is must survive a power cut. Pieces
    that fill a shard are joined into one, and a piece is deleted only once its shard is on the disk; so after
    `restore`, whenever the process before was killed, the same calls lead to the same files. A file has its
    final name only after `finish`.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._max = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._pieces: list[Piece] = []
        self.names: set[str] = set()  # of all tensors that were added

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that were added."""
        return sum(piece.num_bytes for piece in self._pieces) + self._pending_bytes

    def restore(self, pieces: Sequence[Piece]) -> None:
        """Takes over the pieces that a writer of the same folder had committed; goes on behind them.

        CheckpointError naming a file of them that is gone, with no shard that holds its tensors.
        """
        assert not self.names
        self._pieces = list(pieces)
        self.names = {name for piece in pieces for name in piece.names}
        for number, group in enumerate(self._groups()):
            lost = [file for file in map(self._file, group) if not file.is_file()]
            if lost and not self._is_made(number):
                raise CheckpointError(f"{lost[0]} is gone, and what was begun is lost: begin anew")

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor; the writer keeps it until its shard is full."""
        assert name not in self.names, name
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max:
            self.commit()
        self.names.add(name)
        # contiguous and without siblings: safetensors refuses views of one storage
        self._pending[name] = tensor.detach().to("cpu").contiguous().clone()
        self._pending_bytes += size

    def commit(self) -> list[Piece]:
        """Puts what is pending on the disk, and says of which pieces all consists by now."""
        if self._pending:
            piece = Piece(f"piece-{len(self._pieces):05d}.draft", tuple(self._pending), self._pending_bytes)
            _save(self._pending, self._file(piece))
            self._pending, self._pending_bytes = {}, 0
            self._pieces.append(piece)
        for number, group in enumerate(self._groups()[:-1]):
            self._join(number, group)
        return list(self._pieces)

    def finish(self) -> None:
        """Writes what is pending, names the files and writes the index if there are several."""
        self.commit()
        groups = self._groups()
        count = len(groups)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        names = [SINGLE] if count == 1 else names
        for number, (group, name) in enumerate(zip(groups, names, strict=True)):
            if not (self._folder / name).exists():  # which a run has named that was killed then
                self._join(number, group)
                self._shard(number).rename(self._folder / name)
        for piece in self._pieces:  # made again after a run that was killed while it joined
            self._file(piece).unlink(missing_ok=True)
        if count > 1:
            placed = zip(groups, names, strict=True)
            weight_map = {tensor: name for group, name in placed for piece in group for tensor in piece.names}
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_json(self._folder / INDEX, index)

    def _groups(self) -> list[list[Piece]]:
        """Pieces shard by shard, in order, as many as fit into each."""
        groups: list[list[Piece]] = []
        for piece in self._pieces:
            if groups and sum(p.num_bytes for p in (*groups[-1], piece)) <= self._max:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        return groups

    def _file(self, piece: Piece) -> Path:
        return self._folder / piece.file

    def _shard(self, number: int) -> Path:
        return self._folder / f"shard-{number:05d}.draft"

    def _is_made(self, number: int) -> bool:
        named = [SINGLE] if number == 0 else []
        named += [file.name for file in self._folder.glob(f"model-{number + 1:05d}-of-*.safetensors")]
        return self._shard(number).exists() or any((self._folder / name).exists() for name in named)

    def _join(self, number: int, group: Sequence[Piece]) -> None:
        """Makes one shard of pieces, unless it is there; then deletes them."""
        if self._is_made(number):
            return
        shard, files = self._shard(number), [self._file(piece) for piece in group]
        if len(files) == 1:
            files[0].rename(shard)
            return
        _copy_together(files, shard)
        for file in files:
            file.unlink()


def _copy_together(files: Sequence[Path], target: Path) -> None:
    """One safetensors file of the tensors of several, copied a stretch at a time, widest numbers first."""
    places = []
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = json.loads(stream.read(length))
        raw.pop("__metadata__", None)
        places += [(file, 8 + length, name, entry) for name, entry in raw.items()]
    places.sort(key=lambda place: (-ITEM_BYTES.get(place[3]["dtype"], 1), place[2]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for _, _, name, entry in places:
        start, end = end, end + entry["data_offsets"][1] - entry["data_offsets"][0]
        header[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _whole(target) as draft, draft.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for file, base, _, entry in places:
            start, stop = entry["data_offsets"]
            with file.open("rb") as stream:
                stream.seek(base + start)
                for left in range(stop - start, 0, -_STRETCH):
                    out.write(stream.read(min(left, _STRETCH)))


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Writes a file that is whole or not there, whatever happens to process or machine."""
    with _whole(file) as draft:
        with write_faults(draft):
            save_file(tensors, draft, metadata={"format": "pt"})
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)  # safetensors makes it readable by its owner alone


@contextmanager
def write_faults(file: Path) -> Iterator[None]:
    """Of what safetensors raises, a full disk and its like as the OSError that they are."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None or int(found[1]) == errno.EINTR:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    draft = file.with_suffix(".part")
    yield draft
    with draft.open("rb") as stream:
        os.fsync(stream.fileno())
    draft.rename(file)
