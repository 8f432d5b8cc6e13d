"""Writes a changed copy of a checkpoint, whole or not at all.

What serving needs beside the weights (tokenizer, chat template, generation config with every EOS id) goes
along from the source; config.json is the source's with another `quantization_config`. Everything is written
to `OUT.partial`, opened and checked there as any reader would, and only then named `OUT`. Whoever keeps a
record of what he committed there can go on after the process was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.files import companions, empty, write_json
from qinfer.checkpoint.shard_writer import MAX_SHARD_BYTES, Piece, ShardWriter
from qinfer.errors import UserError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# what a folder may hold that is replaced: a checkpoint's files, and the reports that qinfer puts beside them
_CHECKPOINT_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.md",
    "*.html",
    "*.tiktoken",
    "additional_chat_templates",
)


class CheckpointWriter:
    """Fills `OUT.partial` tensor by tensor; `finish` makes it `OUT`, `abort` removes it.

    With `keep` what an earlier writer left in `OUT.partial` stays, to be taken over by `restore`.
    Raises UserError at once when `out` cannot be written, when it exists and is not an empty folder, when
    another writer is at it, and when `overwrite` would delete anything but the files of a checkpoint: the
    source, a folder around it, or what somebody else keeps there.
    """

    def __init__(
        self,
        source: Checkpoint,
        out: Path,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
        keep: bool = False,
    ) -> None:
        self._source = source
        self._new_parents: list[Path] = []
        try:
            self._out = Path(out).resolve()
            _check_free(self._out, source.path.resolve(), overwrite)
            self._partial = partial_folder(out)
            self._new_parents = [folder for folder in self._out.parents if not folder.exists()]
            self._release = weakref.finalize(self, _unlock, _locked(self._partial))
            try:  # again: another run may have finished there before this one had the lock
                _check_free(self._out, source.path.resolve(), overwrite)
            except UserError:
                with contextlib.suppress(OSError):
                    self._partial.rmdir()  # which is empty, since the other's was renamed
                raise
            if not keep:
                empty(self._partial)  # of a run that was killed
        except OSError as error:
            self._undo_parents()
            reason = error.strerror or str(error)
            raise UserError(f"{out} cannot be written ({reason}): choose another folder", "out") from None
        self._finished = False
        self._shards = ShardWriter(self._partial, max_shard_bytes)

    @property
    def folder(self) -> Path:
        """Where everything is until `finish`."""
        return self._partial

    @property
    def names(self) -> set[str]:
        """Names of the tensors that were added."""
        return self._shards.names

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that were added."""
        return self._shards.total_bytes

    def restore(self, pieces: Sequence[Piece]) -> None:
        """Goes on behind what an earlier writer had committed; CheckpointError where a file of it is gone."""
        self._shards.restore(pieces)

    def commit(self) -> list[Piece]:
        """Makes what was added survive a kill or a power cut; says what `restore` wants to know."""
        return self._shards.commit()

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor under its full name; each name once, dtype and shape as they are to be stored."""
        self._shards.add(name, tensor)

    def finish(
        self,
        quantization_config: dict[str, Any] | None,
        extra_files: Mapping[str, str] | None = None,
        check: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        """Completes the folder; `extra_files` are texts by file name (reports).

        `check` is asked about the checkpoint as it will be, and may raise what it thinks of it.

        What begins with a dot in `folder` is somebody's record of the work and is removed. Raises
        CheckpointError, and leaves no output, when a tensor that the model needs was not added.
        """
        self._shards.finish()
        write_json(self._partial / "config.json", _config(self._source.raw_config, quantization_config))
        for file in companions(self._source.path):
            target = self._partial / file.relative_to(self._source.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
        for name, text in (extra_files or {}).items():
            (self._partial / name).write_text(text, encoding="utf-8")
        try:
            written = open_checkpoint(self._partial)
            if check is not None:
                check(written)
        except Exception:
            self.abort()
            raise
        for record in self._partial.glob(".*"):
            shutil.rmtree(record)
        self._replace_out()
        self._finished = True
        self.release()

    def abort(self) -> None:
        """Removes what was written; `out` stays as it was. Does nothing after `finish` or `release`."""
        if self._finished or not self._release.alive:  # what lies there now is another writer's
            return
        shutil.rmtree(self._partial, ignore_errors=True)
        self._undo_parents()
        self.release()

    def release(self) -> None:
        """Lets another writer have the folder, with what is in it; the end of a process does so too."""
        self._release()

    def _undo_parents(self) -> None:
        for folder in self._new_parents:
            with contextlib.suppress(OSError):  # never made, or not empty and so needed
                folder.rmdir()

    def _replace_out(self) -> None:
        if self._out.exists():
            old = self._out.with_name(self._out.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            self._out.rename(old)
            try:
                self._partial.rename(self._out)
            finally:  # whatever happens, an interrupt too, one of the two is there
                if self._out.exists():
                    shutil.rmtree(old, ignore_errors=True)
                else:
                    old.rename(self._out)
        else:
            self._partial.rename(self._out)


def _locked(folder: Path) -> int | None:
    """Makes the folder and locks it for this process alone; the handle that holds the lock.

    The folder itself is locked, not a file in it: so nothing is left over, and the lock goes along when it is
    renamed. None, and no lock, where the platform has none. Raises UserError where another writer has it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return None
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(
                f"{folder} is being written by another run: wait for its end or choose another folder", "out"
            ) from None
        except OSError:  # a network's file system may have no locks
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), folder.stat()):
                return handle
        os.close(handle)  # the other run has just ended, and removed or renamed it


def _unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def partial_folder(out: Path) -> Path:
    """Where `out` is made."""
    out = out.resolve()
    return out.with_name(out.name + ".partial")


def check_out(source: Checkpoint, out: Path, *, overwrite: bool) -> None:
    """Raises the UserError that a writer would raise at its start; leaves everything as it is."""
    kept = os.path.exists(partial_folder(out))  # False also for a name that no folder can have
    writer = CheckpointWriter(source, out, overwrite=overwrite, keep=True)
    if not kept:
        writer.abort()
    writer.release()


def _check_free(out: Path, source: Path, overwrite: bool) -> None:
    """UserError unless a checkpoint may be put there."""
    if out == source or out in source.parents:
        raise UserError(f"{out} is the source itself or holds it: choose another folder", "out")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose a folder that does not exist yet", "out")
    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"{out} is not empty: choose another folder or overwrite it (--overwrite, overwrite=True)", "out"
        )
    if out.is_dir() and (strangers := _strangers(out)):
        raise UserError(
            f"{out} holds more than a checkpoint ({', '.join(strangers[:3])}), which overwriting would "
            "delete: choose another folder",
            "out",
        )


def _strangers(folder: Path) -> list[str]:
    """Names in a folder that no checkpoint has; all of them where it holds no config.json."""
    names = sorted(path.name for path in folder.iterdir())
    if "config.json" not in names:
        return names
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in _CHECKPOINT_FILES)]


def _config(source: Mapping[str, Any], quantization_config: dict[str, Any] | None) -> dict[str, Any]:
    config = {k: v for k, v in source.items() if k not in ("quantization_config", "compression_config")}
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    return config
