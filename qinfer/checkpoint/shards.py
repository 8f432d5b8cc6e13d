"""safetensors files: their headers, their tensors, and writing them in shards with an index.

A safetensors file is 8 bytes of length (little-endian), a JSON header that gives each tensor's dtype, shape
and byte range, and the bytes. So names and shapes of a model cost a few kilobytes to read. A model too large
for one file is several, with `model.safetensors.index.json` saying which tensor lies where.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from qinfer.checkpoint.files import read_json, write_json
from qinfer.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 2 * 1000**3  # also the most that a writer keeps in memory


class Header(NamedTuple):
    """One tensor as the file's header describes it; `dtype` in safetensors' words ("BF16", "I8")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(file: Path) -> dict[str, Header]:
    """Every tensor of one file; CheckpointError when the file is cut off or no safetensors file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 + length:
                raise ValueError(f"{size} bytes are too few")
            raw = json.loads(stream.read(length))
        raw.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in raw.values()), default=0)
        headers = {name: Header(file, tuple(e["shape"]), e["dtype"]) for name, e in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    if size < end:
        raise CheckpointError(f"{file} is cut off: it has {size} bytes of {end}; fetch or copy it again")
    return headers


def find_tensors(folder: Path) -> dict[str, Header]:
    """Every tensor of a model folder, by the index where there is one.

    Raises CheckpointError when there are no weights, and naming every file that the index lists and that is
    missing, or every tensor that it promises in a file that does not hold it.
    """
    if not (folder / INDEX).is_file():
        headers: dict[str, Header] = {}
        for file in _unindexed(folder):
            headers |= read_headers(file)
        return headers
    weight_map: dict[str, str] = read_json(folder / INDEX).get("weight_map") or {}
    files = sorted(set(weight_map.values()))
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: files that {INDEX} lists are missing: {', '.join(absent)}")
    by_file = {name: read_headers(folder / name) for name in files}
    if absent := [f"{name} ({file})" for name, file in weight_map.items() if name not in by_file[file]]:
        raise CheckpointError(
            f"{folder}: tensors that {INDEX} lists are not in their files: {', '.join(absent)}"
        )
    return {name: by_file[file][name] for name, file in weight_map.items()}


def _unindexed(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder} has several weight files ({names}) but no {INDEX}")
    others = sorted(file.name for kind in ("*.bin", "*.pth", "*.gguf") for file in folder.glob(kind))
    hint = f"; it has {', '.join(others)} (give a .gguf by its path, convert others)" if others else ""
    raise CheckpointError(f"{folder} has no weights (*.safetensors){hint}")


class ShardWriter:
    """Writes tensors as model.safetensors, or as several shards and an index when they are too many.

    A file has its final name only after `finish`. At most `max_shard_bytes` are kept in memory (more if one
    tensor is larger).
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._max = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._drafts: list[Path] = []
        self._flushed: list[tuple[str, ...]] = []  # tensors of each draft
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor; the writer keeps it until its shard is full."""
        assert not any(name in names for names in (self._pending, *self._flushed)), name
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max:
            self._flush()
        # contiguous and without siblings: safetensors refuses views of one storage
        self._pending[name] = tensor.detach().to("cpu").contiguous().clone()
        self._pending_bytes += size
        self.total_bytes += size

    def finish(self) -> None:
        """Writes what is pending, names the files and writes the index if there are several."""
        if self._pending:
            self._flush()
        count = len(self._drafts)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        names = [SINGLE] if count == 1 else names
        for draft, name in zip(self._drafts, names, strict=True):
            draft.rename(self._folder / name)
        if count > 1:
            placed = zip(self._flushed, names, strict=True)
            weight_map = {tensor: name for tensors, name in placed for tensor in tensors}
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_json(self._folder / INDEX, index)

    def _flush(self) -> None:
        draft = self._folder / f"shard-{len(self._drafts):05d}.draft"
        save_file(self._pending, draft, metadata={"format": "pt"})
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)  # safetensors makes it readable by its owner alone
        self._drafts.append(draft)
        self._flushed.append(tuple(self._pending))
        self._pending = {}
        self._pending_bytes = 0
