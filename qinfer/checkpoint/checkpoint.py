"""A local safetensors folder, opened lazily (signatures first; the body follows)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from qinfer.checkpoint.compressed_tensors import Quantization
from qinfer.config import ModelConfig
from qinfer.quant.scheme import Scheme


class Checkpoint:
    """A local safetensors folder whose headers have been read."""

    path: Path
    raw_config: dict[str, Any]
    config: ModelConfig
    quantization: Quantization

    def names(self) -> frozenset[str]:
        """Every tensor name in the files."""
        raise NotImplementedError

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, safetensors dtype string such as 'BF16'), no data read."""
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """One tensor; CheckpointError naming tensor and file when missing."""
        raise NotImplementedError

    def scheme(self, module: str) -> Scheme:
        """Scheme of a full module name; Dense() when it is not quantized."""
        raise NotImplementedError

    def module(self, module: str) -> dict[str, Tensor]:
        """That linear's tensors by suffix, checked against scheme.specs."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files."""
        raise NotImplementedError

    @property
    def is_quantized(self) -> bool:
        """Whether config.json holds a quantization_config."""
        raise NotImplementedError


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a local folder and lists everything that is missing."""
    raise NotImplementedError
