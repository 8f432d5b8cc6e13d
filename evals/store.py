"""Results kept on disk under what they are results of, so that nothing is measured twice.

A key is the SHA-256 of all that decides the numbers: the model's files, how it is run, the text, the versions
and qinfer's own code. So nothing here can go stale: what differs in anything has another key. The source of a
comparison is read once and then only looked up, and a run that was stopped goes on where it was.

Entries are files that appear whole or not at all. When they take more than the bound, those that were used
longest ago go. What cannot be written is measured again next time, with one warning; what cannot be read
counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

import qinfer

MAX_BYTES = 4 << 30

logger = logging.getLogger(__name__)


def key_of(**parts: Any) -> str:
    """SHA-256 (hex) of JSON-ready parts, by their names."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@cache
def code_digest() -> str:
    """SHA-256 (hex) of qinfer's own Python files: numbers made by other code are other numbers."""
    digest = hashlib.sha256()
    root = Path(qinfer.__file__).parent
    walked = os.walk(root, followlinks=True)  # three folders are links where the repository is the package
    for path in sorted(Path(folder) / name for folder, _, names in walked for name in names):
        if path.suffix == ".py":
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Store:
    """Bytes by key in a folder that is made when the first are put."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._added: int | None = None  # bytes since the folder was last measured; None: never was
        self._works = True

    def get(self, key: str) -> bytes | None:
        """What was put under the key, if it is still there."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)  # used now, whatever the file system thinks of reading
        except OSError:
            return None
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keeps the bytes, and drops those used longest ago where there are too many."""
        if not self._works:
            return
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may hold somebody's prompts
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(data)
            partial.replace(path)
            if self._added is None or self._added + len(data) > self.max_bytes // 16:
                self._trim()
            else:
                self._added += len(data)
        except OSError as error:
            self._works = False
            logger.warning("results are not kept in %s: %s", self.folder, error.strerror)

    def tensors(self, key: str) -> dict[str, Tensor] | None:
        """The tensors that were put under the key, on the CPU."""
        data = self.get(key)
        try:
            return None if data is None else load(data)
        except SafetensorError:
            logger.warning("%s cannot be read and is made again", self._path(key))
            return None

    def put_tensors(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keeps tensors by name."""
        self.put(key, save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _trim(self) -> None:
        """Removes the entries used longest ago until the rest takes no more than the bound."""
        entries = [(path.stat(), path) for path in self.folder.glob("??/*")]
        entries.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        total = 0
        for stat, path in entries:
            total += stat.st_size
            if total > self.max_bytes:
                path.unlink(missing_ok=True)
        self._added = 0
