"""A GGUF file opened, or what is wrong with it in one line.

The gguf library maps the file and takes what lies where the file says that something lies. Of a file that was
cut off, by a download that ended early or a disk that was full, it takes fewer numbers than there should be
and fails somewhere later, in numpy's words. Here each look beyond the end is noticed, and before any tensor
is looked at, how long the file should be: the header, which comes first, says where every tensor ends.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray

from qinfer.errors import CheckpointError

_MAGIC = b"GGUF"


class _CutOff(Exception):
    """A file ends before what it says that it holds; the message says where."""


class _Reader(gguf.GGUFReader):
    """The library's reader, which sees where the file ends too early."""

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, *order: Any, **named: Any) -> NDArray[Any]:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise _CutOff(f"it ends within its header, after {len(self.data):,} bytes")
        array: NDArray[Any] = super()._get(offset, dtype, count, *order, **named)
        return array

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        whole = max((start_offs + _end(field) for field in fields), default=start_offs)
        if whole > len(self.data):
            raise _CutOff(f"it has {len(self.data):,} of {whole:,} bytes")
        super()._build_tensors(start_offs, fields)


def _end(field: gguf.ReaderField) -> int:
    """Where a tensor's data end, counted from where all data begin."""
    _, _, _, shape, kind, offset = field.parts
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
    return int(offset[0]) + int(math.prod(shape.tolist()) // block * block_bytes)


def read_gguf(file: Path) -> tuple[dict[str, gguf.ReaderTensor], dict[str, Any]]:
    """Tensors and metadata, both by name, of a file that is all there.

    Raises CheckpointError for any other, with what to do.
    """
    _check_beginning(file)
    try:
        reader = _Reader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except _CutOff as error:
        raise CheckpointError(f"{file} is not a whole GGUF file: {error}; fetch it again") from None
    except (IndexError, KeyError, ValueError) as error:  # as the library has it
        raise CheckpointError(
            f"{file} is damaged, or a kind of GGUF that is not known here ({error}); fetch it again"
        ) from error
    return {tensor.name: tensor for tensor in reader.tensors}, metadata


def _check_beginning(file: Path) -> None:
    """CheckpointError for a file that is empty or another one, such as a page that says why there is none."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not begin:
        raise CheckpointError(f"{file} is not a whole GGUF file: it is empty; fetch it again")
    if not _MAGIC.startswith(begin):
        raise CheckpointError(
            f"{file} is not a GGUF file: it begins with {begin!r}, not {_MAGIC!r}; look at what was fetched"
        )
