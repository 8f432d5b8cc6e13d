"""Where the residual streams of the batches wait while one batch is worked on.

    a CPU with room for all   as tensors; what is made of them for a group of linears is kept as well
    a GPU                     in host memory: the device holds one layer and one batch, however much text
    little memory             in files, a batch each, whichever device works

In the last two cases the inputs of a group are made anew from the stream whenever somebody looks: on a GPU
that costs less than to move them, and from files it is the only way. The numbers are the same in each place.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qinfer.checkpoint.shard_writer import write_faults

_NAME = "stream"


class Rest(NamedTuple):
    """A place to wait: memory, or files of `folder`; `device` is where the work is done."""

    device: torch.device
    folder: Path | None = None

    @property
    def keeps(self) -> bool:
        """Whether what is made of a stream may stay as well: it lies where the work is done."""
        return self.folder is None and self.device.type == "cpu"

    def slot(self, name: str) -> Slot:
        """Room for one tensor; `name` is its own among those that wait in files."""
        if self.folder is None:
            return _Memory(self.device)
        self.folder.mkdir(parents=True, exist_ok=True)
        return _File(self.device, self.folder / f"{name}.safetensors")


class Slot(ABC):
    """One tensor that waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def get(self) -> Tensor:
        """The tensor, on the device; not to be changed in place."""

    @abstractmethod
    def put(self, tensor: Tensor) -> None:
        """Another tensor in its place."""

    @abstractmethod
    def save(self, file: Path) -> None:
        """A copy in `file`, on the disk when this returns."""

    @abstractmethod
    def restore(self, file: Path) -> None:
        """The tensor that `save` wrote in place of the one that is here."""


class _Memory(Slot):
    _tensor: Tensor | None = None

    def get(self) -> Tensor:
        assert self._tensor is not None, "nothing waits here yet"
        return self._tensor.to(self.device)

    def put(self, tensor: Tensor) -> None:
        here = self._tensor
        if here is not None and tensor.is_cuda and here.shape == tensor.shape and here.dtype is tensor.dtype:
            here.copy_(tensor)  # 16 GB/s from an H200; into new memory 1.3
        else:
            self._tensor = tensor.cpu()

    def save(self, file: Path) -> None:
        assert self._tensor is not None, "nothing waits here yet"
        _write(self._tensor, file)
        _sync(file)

    def restore(self, file: Path) -> None:
        self._tensor = load_file(file)[_NAME]


class _File(Slot):
    def __init__(self, device: torch.device, file: Path) -> None:
        super().__init__(device)
        self._file = file

    def get(self) -> Tensor:
        return load_file(self._file)[_NAME].to(self.device)

    def put(self, tensor: Tensor) -> None:
        draft = self._file.with_suffix(".part")  # the file may be mapped by whoever still reads it
        _write(tensor, draft)
        draft.rename(self._file)

    def save(self, file: Path) -> None:
        shutil.copyfile(self._file, file)
        _sync(file)

    def restore(self, file: Path) -> None:
        draft = self._file.with_suffix(".part")
        shutil.copyfile(file, draft)
        draft.rename(self._file)


class Made(Sequence[Tensor]):
    """A tensor per batch that is made whenever somebody asks for it."""

    def __init__(self, make: Callable[[int], Tensor], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._count)[index]]
        return self._make(range(self._count)[index])


def made(make: Callable[[int], Tensor], count: int, rest: Rest) -> Sequence[Tensor]:
    """What `make` makes of each batch: now and once where `rest` keeps it, else when asked for."""
    return [make(i) for i in range(count)] if rest.keeps else Made(make, count)


def _write(tensor: Tensor, file: Path) -> None:
    with write_faults(file):
        save_file({_NAME: tensor.detach().cpu().contiguous()}, file)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
