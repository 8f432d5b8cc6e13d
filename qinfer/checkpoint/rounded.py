"""A dense checkpoint as it reads with every linear rounded to nearest in one scheme; nothing is written."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.checkpoint.checkpoint import CPU, Checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.dtypes import DTYPES
from qinfer.quant import Dense, Scheme, quantize_named


class RoundedCheckpoint(Checkpoint):
    """Answers like a checkpoint that `quantize --method rtn` made of `source`, linear by linear, when asked.

    `scheme` must need no calibration.
    """

    def __init__(self, source: Checkpoint, scheme: Scheme) -> None:
        vars(self).update(vars(source))
        self._scheme = scheme
        self._linears = frozenset(all_modules(source.config))

    def scheme(self, module: str) -> Scheme:
        """The one scheme for all linears of layers; the head stays dense."""
        return self._scheme if module in self._linears else Dense()

    def module(self, module: str, device: torch.device = CPU) -> dict[str, Tensor]:
        """The linear's tensors, made now on `device`."""
        name = f"{module}.weight"
        weight = self.tensor(name, device).float()
        return quantize_named(self._scheme, name, weight, dtype=DTYPES[self.config.dtype])
