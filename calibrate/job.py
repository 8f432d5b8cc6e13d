"""What a quantize run is to do, settled and checked, and what follows from that before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import qinfer
from qinfer.calibrate import health
from qinfer.calibrate.data import DEFAULT_SEED, CalibrationData
from qinfer.calibrate.devices import device_name, fast_dtype
from qinfer.calibrate.kv_scales import kv_cache_scheme
from qinfer.calibrate.mixing import unit_bits
from qinfer.calibrate.needs import Work
from qinfer.calibrate.recipe import Recipe
from qinfer.calibrate.sensitivity import Unit
from qinfer.checkpoint.checkpoint import CPU, Checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import all_modules, layer_groups, layer_prefix, unquantized
from qinfer.dtypes import DTYPES, name_of
from qinfer.quant import Scheme


@dataclass(frozen=True)
class QuantizeJob:
    """Everything that a run needs, settled and checked; `data` is None for a method that needs no text."""

    source: Checkpoint
    out: Path
    recipe: Recipe
    data: CalibrationData | None
    overwrite: bool = False
    dtype: torch.dtype | None = None  # of activations while calibrating; None: what the processor is fast at
    kv_scales: str | None = None  # one of kv_scales.KV_SCALES
    mix: Mapping[Unit, Scheme] = field(default_factory=dict)  # units that have a scheme of their own
    costs: Mapping[Unit, float] = field(default_factory=dict)  # KL of each unit alone, where it was measured
    seed: int = DEFAULT_SEED
    resume: bool = True  # whether to go on with what the same command left unfinished
    device: torch.device = CPU

    @property
    def storage(self) -> torch.dtype:
        """The checkpoint's dtype, in which scales are stored."""
        return DTYPES[self.source.config.dtype]

    @property
    def activations(self) -> torch.dtype:
        """The dtype of activations while calibrating."""
        return self.dtype or fast_dtype(self.device)

    @property
    def work(self) -> Work:
        """The run in numbers."""
        sequences = () if self.data is None else self.data.sequences
        return Work(
            self.source.config,
            self.recipe,
            sum(map(len, sequences)),
            max(map(len, sequences), default=0),
            self.activations.itemsize,
            on_gpu=self.device.type == "cuda",
        )

    def identity(self) -> dict[str, Any]:
        """All that decides a bit of the result, for JSON."""
        stats = {file.name: file.stat() for file in self.source.weight_files}
        return {
            "qinfer": qinfer.__version__,
            "torch": torch.__version__,
            "source": str(self.source.path.resolve()),
            "weights": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "read as": type(self.source).__name__,
            "scheme": self.recipe.scheme.label,
            "method": self.recipe.method,
            "ranges": self.recipe.ranges,
            "seed": self.seed,
            "device": device_name(self.device),
            "activations": name_of(self.activations),
            "kv_scales": self.kv_scales,
            "calibration": None if self.data is None else self.data.record(),
            "mix": {unit_name(unit): scheme.label for unit, scheme in sorted(self.mix.items())},
        }

    def scheme_of(self, index: int, group: str) -> Scheme:
        """The scheme of one group of one layer."""
        return self.mix.get((index, group), self.recipe.scheme)

    def scheme_of_module(self, module: str) -> Scheme:
        """The scheme of a linear by its full name."""
        return self._schemes[module]

    @cached_property
    def _schemes(self) -> dict[str, Scheme]:
        config = self.source.config
        return {
            layer_prefix(config, i) + module: self.scheme_of(i, group.name)
            for i in range(config.num_layers)
            for group in layer_groups(config)
            for module in group.modules
        }

    def weight_bytes(self, scheme: Scheme | None) -> int:
        """Of all tensors in the files; every linear in `scheme`, or in its own where that is None."""
        config, item = self.source.config, self.storage.itemsize
        linears = {f"{module}.weight" for module in all_modules(config)}
        others = sum(self.source.tensor_bytes(name) for name in self.source.names() - linears)
        units = [(i, group.name) for i in range(config.num_layers) for group in layer_groups(config)]
        bits = sum(unit_bits(config, group, scheme or self.scheme_of(i, group), item) for i, group in units)
        return others + bits // 8

    def expected_names(self) -> set[str]:
        """Of all tensors that the run must have written."""
        config = self.source.config
        names = health.expected_names(config, self.scheme_of_module, self.source.names())
        if kv_cache_scheme(self.kv_scales) is not None:
            prefixes = [layer_prefix(config, i) for i in range(config.num_layers)]
            names |= {f"{prefix}self_attn.{x}_scale" for prefix in prefixes for x in "kv"}
        return names

    def configuration(self) -> dict[str, Any]:
        """The checkpoint's `quantization_config`."""
        exceptions = {m: self.scheme_of_module(m) for m in all_modules(self.source.config)}
        return quantization_config(
            self.recipe.scheme,
            ignore=unquantized(self.source.config),
            exceptions={m: s for m, s in exceptions.items() if s != self.recipe.scheme},
            kv_cache_scheme=kv_cache_scheme(self.kv_scales),
        )


def unit_name(unit: Unit) -> str:
    """A unit in words."""
    return f"layer {unit[0]} {unit[1]}"
