"""Linears that lie in their file as another tool packs them, and how they become tensors of a scheme of ours.

Checkpoints of other tools hold the same few things as ours, codes, scales and perhaps zero points, in other
shapes, orders and conventions. So each dialect (gptq.py, awq.py, float8.py) looks at a folder's headers and
says, linear by linear, what lies there and which scheme runs it: a `Stored`. Reading one rearranges bits and
changes no value; where that is not possible, because no scheme means the same (3 bits, groups of 16, blocks
that a fused product cuts), the weight is dequantized while loading and runs dense, and a warning says so.
What is quantized is read from the tensors that are there, not from lists of names, which tools match by rules
of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from qinfer.checkpoint import names
from qinfer.checkpoint.shards import Header
from qinfer.config import ModelConfig
from qinfer.quant import Dense, Scheme, TensorSpec


class Stored(Protocol):
    """One linear as its file holds it."""

    @property
    def scheme(self) -> Scheme:
        """The scheme whose tensors `read` makes."""
        ...

    @property
    def order(self) -> tuple[int, ...] | None:
        """Group of each input, where groups are not runs of neighbours."""
        ...

    def specs(self) -> dict[str, TensorSpec]:
        """Tensors of the file by suffix; dtype None: any float. Dimensions of 1 may be left out or added."""
        ...

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The scheme's file tensors from those of `specs`, shaped as it says.

        Raises CheckpointError where a tensor contradicts the configuration.
        """
        ...

    def dense(self) -> Stored:
        """The same, dequantized while it is read."""
        ...


class Folder(NamedTuple):
    """What a dialect may look at while a checkpoint is opened; `tensor` reads one, which costs time."""

    path: Path
    config: ModelConfig
    headers: Mapping[str, Header]
    tensor: Callable[[str], Tensor]

    def has(self, name: str) -> bool:
        """Whether some file holds a tensor of that name."""
        return name in self.headers

    def linears(self) -> dict[str, tuple[int, int]]:
        """Full name -> (out_features, in_features) of every linear inside the layers."""
        shapes = {
            module: names.linear_shape(self.config, module) for module in names.layer_modules(self.config)
        }
        return {
            names.layer_prefix(self.config, i) + module: shape
            for i in range(self.config.num_layers)
            for module, shape in shapes.items()
        }


Survey = Callable[[Mapping[str, Any], Folder], dict[str, Stored]]
"""What one tool's quantization_config and headers say: the linears that are quantized, by full name."""


def agree(folder: Folder, stored: dict[str, Stored]) -> dict[str, Stored]:
    """Makes linears that run as one product alike: where they are not, those quantized are dequantized."""
    config = folder.config
    agreed = dict(stored)
    for i in range(config.num_layers):
        prefix = names.layer_prefix(config, i)
        for group in names.layer_groups(config):
            modules = [prefix + module for module in group.modules]
            kinds = {(s.scheme, s.order) if (s := stored.get(m)) else (Dense(), None) for m in modules}
            if len(kinds) > 1:
                agreed |= {module: stored[module].dense() for module in modules if module in stored}
    _warn_of_dense(folder, agreed)
    return agreed


def _warn_of_dense(folder: Folder, stored: Mapping[str, Stored]) -> None:
    dense = [name for name, linear in stored.items() if isinstance(linear.scheme, Dense)]
    if dense:
        warnings.warn(
            f"{folder.path}: {len(dense)} quantized linears ({dense[0]}, ...) have no kernel as they are "
            "stored, or run as one product with others that differ: they are dequantized while loading",
            stacklevel=5,
        )
