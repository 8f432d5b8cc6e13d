"""`qinfer convert`: the same weights in another tool's dialect.

Nothing is quantized again. Codes and zero points are rearranged bit by bit; scales, which AWQ and GPTQ keep
in float16, go over exactly unless float16 cannot hold them, which is counted and reported, and refused where
one would become zero or infinite. What is not quantized is copied as it is. A format that has no word for
what the source holds is refused before anything is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qinfer.checkpoint import awq, compressed_tensors, gptq, names
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.declaration import METHOD
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.dtypes import DTYPES
from qinfer.errors import UserError
from qinfer.quant import Dense, Scheme


class _Target(NamedTuple):
    """What a dialect's config.json says of one scheme, and how a linear of it is written."""

    settings: Callable[[Scheme], dict[str, Any]]
    file_tensors: Callable[[Scheme, Mapping[str, Tensor]], dict[str, Tensor]]


_OTHERS = {
    awq.METHOD: _Target(awq.quantization_config, awq.file_tensors_of),
    gptq.METHOD: _Target(gptq.quantization_config, gptq.file_tensors_of),
}
TARGETS = (METHOD, *_OTHERS)


@dataclass
class Conversion:
    """What was done; `rounded_scales` of `scales` changed on their way to float16, by `largest_change`."""

    source: str
    out: str
    read_as: str
    to: str
    scheme: str
    linears: int = 0
    dense_linears: int = 0
    scales: int = 0
    rounded_scales: int = 0
    largest_change: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def to_text(self) -> str:
        """One line for a terminal."""
        exact = "exactly"
        if self.rounded_scales:
            exact = (
                f"exact but for {self.rounded_scales} of {self.scales} scales, which float16 rounds by up to "
                f"{self.largest_change:.2g}"
            )
        return (
            f"{self.out}: {self.linears} linears of {self.scheme} from {self.read_as} to {self.to}, {exact}; "
            f"{self.dense_linears} dense ones copied"
        )


def check_target(to: str) -> None:
    """UserError unless it is one of TARGETS."""
    if to not in TARGETS:
        raise UserError(f"cannot convert to {to!r}; choose one of {', '.join(TARGETS)}", "to")


def convert(source: Checkpoint, out: Path, to: str, *, overwrite: bool = False) -> Conversion:
    """Writes `source` into `out` in the dialect `to`, one of TARGETS.

    Raises UserError for an unknown dialect, a source that is not quantized, schemes that the dialect has no
    word for, scales that float16 cannot hold, and an `out` that may not be written.
    """
    check_target(to)
    if not source.is_quantized:
        raise UserError(f"{source.path} is not quantized: quantize it first (`qinfer quantize`)", "model")
    schemes = {module: source.scheme(module) for module in names.all_modules(source.config)}
    config = _quantization_config(source, schemes, to)
    kinds = sorted({scheme.label for scheme in schemes.values() if scheme != Dense()})
    done = Conversion(str(source.path), str(out), source.quantization.method, to, ", ".join(kinds))
    writer = CheckpointWriter(source, out, overwrite=overwrite)
    try:
        _write(source, schemes, to, writer, done)
        extra = {"quantize_config.json": json.dumps(config, indent=2)} if to == gptq.METHOD else {}
        writer.finish(config, extra)
    finally:
        writer.abort()  # does nothing after finish
    return done


def _quantization_config(source: Checkpoint, schemes: Mapping[str, Scheme], to: str) -> dict[str, Any]:
    found = list(dict.fromkeys(scheme for scheme in schemes.values() if scheme != Dense()))
    if not found:
        raise UserError(
            f"{source.path}: no linear is stored as a scheme of qinfer's, so there is nothing to convert; "
            "serve it as it is, or quantize the original model",
            "model",
        )
    if to == METHOD:
        most = max(found, key=list(schemes.values()).count)
        others = {module: scheme for module, scheme in schemes.items() if scheme != most}
        kv_cache_scheme = source.quantization.kv_cache_scheme
        return compressed_tensors.quantization_config(
            most, ignore=names.unquantized(source.config), exceptions=others, kv_cache_scheme=kv_cache_scheme
        )
    if len(found) > 1:
        said = ", ".join(scheme.label for scheme in found)
        raise UserError(f"{to} holds one scheme for all linears, and {source.path} has {said}", "to")
    config = _OTHERS[to].settings(found[0])
    dense = [module for module, scheme in schemes.items() if scheme == Dense()]
    if source.config.num_experts:
        prefixes = (names.layer_prefix(source.config, i) for i in range(source.config.num_layers))
        dense += [prefix + names.router(source.config) for prefix in prefixes]
    if dense and to == awq.METHOD:
        config["modules_to_not_convert"] = dense
    elif dense:
        config["dynamic"] = {f"-:^{re.escape(module)}$": {} for module in dense}
    return config


def _write(
    source: Checkpoint, schemes: Mapping[str, Scheme], to: str, writer: CheckpointWriter, done: Conversion
) -> None:
    left = set(source.names())
    for module, scheme in schemes.items():
        left -= {f"{module}.{suffix}" for suffix in source.module_specs(module)}
        tensors = source.module(module)
        if scheme == Dense():
            tensors = {"weight": tensors["weight"].to(DTYPES[source.config.dtype])}
            done.dense_linears += 1
        else:
            done.linears += 1
            if to in _OTHERS:
                tensors = _OTHERS[to].file_tensors(scheme, tensors)
                tensors["scales"] = _in_float16(f"{module}.scales", tensors["scales"], done)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    for name in sorted(left):
        tensor = source.tensor(name)
        if name.endswith(("k_proj.k_scale", "v_proj.v_scale")):  # ModelOpt's, which has them as scalars
            name, tensor = name.replace("k_proj.k_", "k_").replace("v_proj.v_", "v_"), tensor.reshape(-1)
        writer.add(name, tensor)


def _in_float16(name: str, scale: Tensor, done: Conversion) -> Tensor:
    """The scale as the format keeps it; what changes is counted."""
    wide = scale.double()
    narrow = scale.half()
    if not bool(narrow.isfinite().all() and (narrow > 0).eq(wide > 0).all()):
        raise UserError(f"{name} holds scales that float16, which the format wants, cannot hold", "to")
    changes = (narrow.double() - wide).abs() / wide.clamp_min(torch.finfo(torch.float64).tiny)
    done.scales += scale.numel()
    done.rounded_scales += int((changes > 0).sum())
    done.largest_change = max(done.largest_change, float(changes.max()))
    return narrow
