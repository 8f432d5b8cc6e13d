"""A GGUF file's linears rounded anew into schemes that have kernels, so that it is served as small as it was.

Dequantized to bfloat16, as `gguf_convert` does it, a model of 4 bits takes four times the memory. Asked to
(`qinfer convert FILE.gguf`), its linears become:

    Q4_0       w4a16 in groups of 32, asymmetric. A block's values (q - 8) d lie on that grid, with the step
               |d| and the zero point 8, or 7 where d is negative: nothing is lost but a scale's last bits,
               which go from float16 to the model's dtype.
    any other  w8a16-int8. Offsets of Q4_1 and the K-quants are no multiples of the step, as a zero point is,
               so 4 bits would round every weight a second time; 8 bits per row keep them to 1 %. Who wants
               4 bits of them all the same has them calibrated: `qinfer quantize FILE.gguf --scheme awq`.
    floats     stay as they are.

Linears that run as one get one scheme, the finest that one of them asks for. Embeddings and head are dense.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qinfer.checkpoint import awq, names
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.declaration import METHOD
from qinfer.checkpoint.gguf_convert import open_gguf, original_values, place
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.dtypes import DTYPES
from qinfer.errors import UserError
from qinfer.quant import W4A16, Dense, Ranges, Scheme, W8A16Int8, quantize_named

_BLOCK, _BLOCK_BYTES = 32, 18  # of Q4_0: a float16 step d, then 16 bytes of two codes each
_FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
_FINEST_LAST: tuple[Scheme, ...] = (W4A16(_BLOCK, symmetric=False), W8A16Int8(), Dense())


@dataclass
class Requantized:
    """What was done: how many linears, and ||written - file's|| / ||file's||, by what became what."""

    source: str
    out: str
    linears: dict[str, int] = field(default_factory=dict)  # "Q4_0 as w4a16 g32 asym" -> how many
    errors: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def to_text(self) -> str:
        """What became what, and what is to be done next."""
        told = [f"{n} linears of {kind} (error {self.errors[kind]:.2g})" for kind, n in self.linears.items()]
        return (
            f"{self.out}: {', '.join(told)}\n"
            f"not judged: get a verdict with `qinfer eval {self.out} --against {self.source}`"
        )


def check_direct(file: str, to: str) -> None:
    """UserError with the way for a dialect that a GGUF file's linears reach in a second step only."""
    if to == METHOD:
        return
    first = f"`qinfer convert {file} -o DIR`"
    if to == awq.METHOD:
        first = (
            f"{first} where all linears are Q4_0, which keep their 4 bits, or else, as for Q4_1, "
            f"`qinfer quantize {file} --scheme awq -o DIR`"
        )
    raise UserError(
        f"a .gguf file goes to {to} in two steps: {first}; then `qinfer convert DIR --to {to}`", "to"
    )


def requantize(file: Path, source: Checkpoint, out: Path, *, overwrite: bool = False) -> Requantized:
    """Writes the model of a GGUF file into `out`, its linears as near to what they were there as they can be.

    `source` is the checkpoint that `file` was converted to. Raises UserError for a file without quantized
    linears and an `out` that may not be written, CheckpointError for a file that is cut off.
    """
    linears = _Linears(file, source)
    schemes = linears.schemes()
    kinds = [scheme for scheme in schemes.values() if scheme != Dense()]
    if not kinds:
        raise UserError(f"{file} holds no quantized linear: quantize it (`qinfer quantize`)", "model")
    done = Requantized(str(file), str(out))
    writer = CheckpointWriter(source, out, overwrite=overwrite)
    try:
        weights = {f"{module}.weight" for module in schemes}
        for module, tensors in linears.rounded(schemes, done):
            for suffix, tensor in tensors.items():
                writer.add(f"{module}.{suffix}", tensor)
        for name in sorted(source.names() - weights):
            writer.add(name, source.tensor(name))
        most = Counter(kinds).most_common(1)[0][0]
        others = {module: scheme for module, scheme in schemes.items() if scheme != most}
        ignored = names.unquantized(source.config)
        writer.finish(quantization_config(most, ignore=ignored, exceptions=others))
    finally:
        writer.abort()  # does nothing after finish
    return done


class _Linears:
    """The file's linears, by the names that they have here."""

    def __init__(self, file: Path, source: Checkpoint) -> None:
        self._tensors, self._file = open_gguf(file)
        self._source = source
        self._stored = place(self._file, source.config)

    def schemes(self) -> dict[str, Scheme]:
        """What each linear becomes."""
        config = self._source.config
        schemes: dict[str, Scheme] = {}
        for i in range(config.num_layers):
            prefix = names.layer_prefix(config, i)
            for group in names.layer_groups(config):
                modules = [prefix + module for module in group.modules]
                wanted = [_scheme_of(self._kind(module)) for module in modules]
                schemes |= dict.fromkeys(modules, max(wanted, key=_FINEST_LAST.index))
        return schemes

    def rounded(
        self, schemes: Mapping[str, Scheme], done: Requantized
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Each linear's file tensors, one after another; what became of what is counted in `done`."""
        counts: Counter[str] = Counter()
        lost: dict[str, float] = defaultdict(float)
        size: dict[str, float] = defaultdict(float)
        dtype = DTYPES[self._source.config.dtype]
        for module, scheme in schemes.items():
            weight, name = self._weight(module), f"{module}.weight"
            ranges = self._block_ranges(module) if isinstance(scheme, W4A16) else None
            tensors = quantize_named(scheme, name, weight, ranges, dtype=dtype)
            yield module, tensors
            kind = f"{self._kind(module)} as {scheme.label}"
            counts[kind] += 1
            lost[kind] += float((scheme.dequantize(tensors) - weight).square().sum())
            size[kind] += float(weight.square().sum())
        done.linears = dict(counts)
        done.errors = {kind: (lost[kind] / size[kind]) ** 0.5 if size[kind] else 0.0 for kind in counts}

    def _kind(self, module: str) -> str:
        kind: str = self._tensors[self._stored[f"{module}.weight"]].tensor_type.name
        return kind

    def _weight(self, module: str) -> Tensor:
        stored = self._stored[f"{module}.weight"]
        return torch.tensor(self._in_order(module, self._file.values(stored)))

    def _block_ranges(self, module: str) -> Ranges:
        """The ranges whose grid is that of each Q4_0 block: steps |d|, all sixteen codes."""
        data = self._tensors[self._stored[f"{module}.weight"]].data
        blocks = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1, _BLOCK_BYTES)
        d = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0].astype(np.float32)
        step = torch.tensor(self._in_order(module, d))
        below = torch.where(step < 0, 7.0, 8.0)
        return -below * step.abs(), (15.0 - below) * step.abs()

    def _in_order(self, module: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return original_values(self._file, self._source.raw_config, f"{module}.weight", values)


def _scheme_of(kind: str) -> Scheme:
    if kind in _FLOATS:
        return Dense()
    return _FINEST_LAST[0] if kind == "Q4_0" else W8A16Int8()
