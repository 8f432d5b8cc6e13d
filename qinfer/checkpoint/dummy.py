"""A checkpoint that exists as a config.json alone: random weights of that shape, made where they are used.

What a model costs in time and memory depends on its shapes and its scheme, not on what it learned. So a
configuration is enough to measure one that cannot be downloaded, in any scheme, without a quantize run: each
tensor is made on the device when the loader asks for it, and what the loader does with it is what it does
with a file's. Panels of rows are quantized one after the other and joined as q, k and v are, so that no more
than one panel exists in float32.

Weights have the variance 1 / in_features, norms are neutral: logits are finite and of the magnitude 1.
The same seed gives the same weights on the same kind of device.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qinfer.checkpoint import names
from qinfer.checkpoint.checkpoint import CPU, Checkpoint, check_modules, required_tensors
from qinfer.checkpoint.compressed_tensors import (
    Quantization,
    quantization_config,
    read_quantization,
)
from qinfer.checkpoint.declaration import find_quantization_config
from qinfer.checkpoint.files import read_json
from qinfer.config import ModelConfig
from qinfer.dtypes import DTYPES
from qinfer.quant import W4A16, Dense, Scheme, W8A8Fp8Block, W8A8Fp8Static, scheme_by_name, settle_group_size
from qinfer.quant.w8a8_fp8_block import BLOCK

PANEL = 1 << 24  # weights that are in float32 at a time
INPUT_RANGE = 8.0  # of a linear whose inputs have a static scale: what is normed hardly exceeds it


class DummyCheckpoint(Checkpoint):
    """Answers like a checkpoint of this configuration; make one with `open_dummy`."""

    def __init__(
        self, path: Path, raw_config: dict[str, Any], quantization: Quantization, seed: int = 0
    ) -> None:
        config = ModelConfig.from_dict(raw_config)
        super().__init__(path, raw_config, config, quantization, {})
        self._specs = required_tensors(config, quantization)
        self._dtype = DTYPES[config.dtype]
        self._seed = seed

    def names(self) -> frozenset[str]:
        """Every tensor that a checkpoint of this model has."""
        return frozenset(self._specs)

    @property
    def num_bytes(self) -> int:
        """What the tensors would take in files."""
        return sum(
            math.prod(spec.shape) * (spec.dtype or self._dtype).itemsize for spec in self._specs.values()
        )

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape of a dense tensor, and the configuration's dtype as safetensors calls it."""
        return self._specs[name].shape, {"float32": "F32", "float16": "F16"}.get(self.config.dtype, "BF16")

    def tensor(self, name: str, device: torch.device = CPU) -> Tensor:
        """A dense tensor in the configuration's dtype: a matrix, the weight of a norm, or a bias."""
        shape = self._specs[name].shape
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.full(shape, 1.0 - self.config.norm_offset, dtype=self._dtype, device=device)
        random = torch.randn(shape, dtype=self._dtype, device=device, generator=self._generator(name, device))
        return random.mul_(shape[-1] ** -0.5)

    def module(self, module: str, device: torch.device = CPU) -> dict[str, Tensor]:
        """A linear's file tensors by suffix."""
        scheme = self.scheme(module)
        rows, columns = names.linear_shape(self.config, names.relative_name(self.config, module))
        generator = self._generator(module, device)
        height = max(1, PANEL // columns)
        if isinstance(scheme, W8A8Fp8Block):  # panels of whole blocks join without a seam
            height = max(BLOCK, height // BLOCK * BLOCK)
        if isinstance(scheme, W8A8Fp8Static):  # one scale for all rows
            height = rows
        panels = []
        for start in range(0, rows, height):
            shape = (min(height, rows - start), columns)
            weight = torch.randn(shape, device=device, generator=generator).mul_(columns**-0.5)
            panels.append(scheme.quantize(weight, dtype=self._dtype))
        tensors = panels[0] if len(panels) == 1 else scheme.fuse(panels)
        return scheme.with_input_range(tensors, INPUT_RANGE) if isinstance(scheme, W8A8Fp8Static) else tensors

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        """Numbers of one tensor: the same whatever was made before it."""
        seed = zlib.crc32(f"{self._seed} {name}".encode())  # torch's CPU generator takes 32 bits of a seed
        return torch.Generator(device).manual_seed(seed)


def open_dummy(
    path: Path,
    scheme: str | None = None,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    seed: int = 0,
) -> DummyCheckpoint:
    """Random weights for the config.json in `path`; without `scheme` in the formats that it names itself.

    Raises CheckpointError or UnsupportedModelError for a configuration that qinfer does not run, UserError
    for an unknown scheme, an option that the scheme does not have, and widths that no group size divides.
    """
    raw = read_json(path / "config.json")
    if scheme is None:
        quantization = read_quantization(find_quantization_config(path, raw))
    else:
        settled = scheme_by_name(scheme, group_size=group_size, symmetric=symmetric)
        config = ModelConfig.from_dict(raw)
        quantization = _everywhere(config, _dividing(config, settled))
    checkpoint = DummyCheckpoint(path, raw, quantization, seed)
    check_modules(checkpoint)
    return checkpoint


def _dividing(config: ModelConfig, scheme: Scheme) -> Scheme:
    """The scheme, its groups made small enough for this model, as quantizing it would."""
    if not isinstance(scheme, W4A16):
        return scheme
    widths = {module: names.linear_shape(config, module)[1] for module in names.layer_modules(config)}
    return W4A16(settle_group_size(widths, scheme.group_size), scheme.symmetric)


def _everywhere(config: ModelConfig, scheme: Scheme) -> Quantization:
    if isinstance(scheme, Dense):
        return Quantization()
    return read_quantization(quantization_config(scheme, ignore=names.unquantized(config)))
