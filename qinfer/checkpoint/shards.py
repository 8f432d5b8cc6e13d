"""safetensors files of a model: which there are, and what their headers say.

A safetensors file is 8 bytes of length (little-endian), a JSON header that gives each tensor's dtype, shape
and byte range, and the bytes. So names and shapes of a model cost a few kilobytes to read. A model too large
for one file is several, with `model.safetensors.index.json` saying which tensor lies where.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import NamedTuple

from qinfer.checkpoint.files import read_json
from qinfer.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # what dense weights may be
ITEM_BYTES = {"I64": 8, "F64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "I16": 2} | dict.fromkeys(
    ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1
)


class Header(NamedTuple):
    """One tensor as the file's header describes it; `dtype` in safetensors' words ("BF16", "I8")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(file: Path) -> dict[str, Header]:
    """Every tensor of one file; CheckpointError when the file is cut off or no safetensors file."""
    if not file.is_file():  # a link that leads nowhere, or a pipe that would never end
        raise CheckpointError(f"{file} is no file that can be read; fetch or copy it again")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 + length:
                raise ValueError(f"{size} bytes are too few")
            raw = json.loads(stream.read(length))
        raw.pop("__metadata__", None)
        headers, ends = {}, [0]
        for name, entry in raw.items():
            _, stop = map(operator.index, entry["data_offsets"])
            ends.append(stop)
            headers[name] = Header(file, tuple(map(operator.index, entry["shape"])), str(entry["dtype"]))
        end = 8 + length + max(ends)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    if size < end:
        raise CheckpointError(f"{file} is cut off: it has {size} bytes of {end}; fetch or copy it again")
    return headers


def find_tensors(folder: Path) -> dict[str, Header]:
    """Every tensor of a model folder, by the index where there is one.

    Raises CheckpointError when there are no weights, and naming every file that the index lists and that is
    missing or not of this folder, or every tensor that it promises in a file that does not hold it.
    """
    if not (folder / INDEX).is_file():
        headers: dict[str, Header] = {}
        for file in _unindexed(folder):
            headers |= read_headers(file)
        return headers
    weight_map = _weight_map(folder)
    files = sorted(set(weight_map.values()))
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: files that {INDEX} lists are missing: {', '.join(absent)}")
    by_file = {name: read_headers(folder / name) for name in files}
    if absent := [f"{name} ({file})" for name, file in weight_map.items() if name not in by_file[file]]:
        raise CheckpointError(
            f"{folder}: tensors that {INDEX} lists are not in their files: {', '.join(absent)}"
        )
    return {name: by_file[file][name] for name, file in weight_map.items()}


def _weight_map(folder: Path) -> dict[str, str]:
    """The index's files by tensor; each a plain name, so that who hashes the folder sees all that is read."""
    weight_map = read_json(folder / INDEX).get("weight_map") or {}
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / INDEX}: weight_map must be a JSON object")
    for name in weight_map.values():
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise CheckpointError(
                f"{folder / INDEX} lists {name!r:.100}, which is no file name of its folder"
            )
    return weight_map


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
