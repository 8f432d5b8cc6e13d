"""Writes a checkpoint folder whole or not at all (signatures first; the body follows)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qinfer.checkpoint.checkpoint import Checkpoint


class CheckpointWriter:
    """Fills DIR.partial tensor by tensor and renames it to DIR in `finish`."""

    def __init__(
        self, source: Checkpoint, out: Path, *, max_shard_bytes: int = 5 * 1000**3, overwrite: bool = False
    ) -> None:
        raise NotImplementedError

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor."""
        raise NotImplementedError

    def finish(
        self, quantization_config: dict[str, Any] | None, extra_files: Mapping[str, str] | None = None
    ) -> None:
        """Writes index, config.json, and the source's other files, then renames."""
        raise NotImplementedError

    def abort(self) -> None:
        """Removes the partial folder."""
        raise NotImplementedError
