"""A model as a folder of safetensors, opened lazily and checked before anything is computed.

Opening reads config.json and the headers of the weight files, never the weights. It compares what is there
with what the configuration needs (names.py for the model, the scheme for what a quantized linear consists
of) and names everything that is missing or has another shape or type, in one error. A checkpoint that opens
is complete; so loading needs no second look and nothing can be left at a random value.
"""

from __future__ import annotations

import warnings
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qinfer.checkpoint import dialects, names
from qinfer.checkpoint.compressed_tensors import Quantization
from qinfer.checkpoint.declaration import find_quantization_config
from qinfer.checkpoint.files import read_json
from qinfer.checkpoint.shards import FLOATS, ITEM_BYTES, Header, find_tensors
from qinfer.checkpoint.stored import Folder
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.quant import Dense, Scheme, TensorSpec, W4A16Ordered

CPU = torch.device("cpu")
_PACKED_HEADS = frozenset({"lm_head.qweight", "lm_head.weight_packed"})
_DTYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class Checkpoint:
    """A local safetensors folder whose headers have been read; make one with `open_checkpoint`.

    `raw_config` is config.json as it stands, `config` what it means, `quantization` which scheme each linear
    has. Tensors are read from disk when asked for.
    """

    def __init__(
        self,
        path: Path,
        raw_config: dict[str, Any],
        config: ModelConfig,
        quantization: Quantization,
        headers: dict[str, Header],
    ) -> None:
        self.path = path
        self.raw_config = raw_config
        self.config = config
        self.quantization = quantization
        self._headers = headers
        self._open: tuple[Path, Any] | None = None  # the file that was read last

    def names(self) -> frozenset[str]:
        """Every tensor in the files."""
        return frozenset(self._headers)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of a tensor in safetensors' words ("BF16", "I8"); reads no data."""
        header = self._header(name)
        return header.shape, header.dtype

    def tensor(self, name: str, device: torch.device = CPU) -> Tensor:
        """A tensor as the file holds it; CheckpointError naming it and the file when it cannot be read.

        On the CPU it is a view of the file. One file is mapped at a time, and its pages count as memory of
        this process until it and its views are gone: who asks for tensors on a GPU, in the files' order,
        holds one shard at most.
        """
        file = self._header(name).file
        try:
            if self._open is None or self._open[0] != file:
                self._open = None  # unmapped before the next is
                self._open = file, safe_open(file, framework="pt")
            tensor: Tensor = self._open[1].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"tensor {name} cannot be read from {file}: {error}") from error
        return tensor.to(device)

    def scheme(self, module: str) -> Scheme:
        """Scheme of a linear by its full name, "model.layers.0.self_attn.q_proj"."""
        return self.quantization.scheme(module)

    def tensor_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file; reads no data."""
        shape, dtype = self.header(name)
        return prod(shape) * ITEM_BYTES[dtype]

    def module(self, module: str, device: torch.device = CPU) -> dict[str, Tensor]:
        """That linear's tensors by suffix ("weight", "weight_scale"), as its scheme lists them; no bias.

        What lies in the file in another tool's layout is brought into the scheme's, on `device`; raises
        CheckpointError where it contradicts itself.
        """
        tensors = {
            suffix: self.tensor(f"{module}.{suffix}", device).reshape(spec.shape)
            for suffix, spec in self.module_specs(module).items()
        }
        stored = self.quantization.stored.get(module)
        if stored is None:
            return tensors
        try:
            return stored.read(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {module}: {error}") from error

    def module_specs(self, module: str) -> dict[str, TensorSpec]:
        """The tensors of the file that make up a linear, by suffix; no bias."""
        stored = self.quantization.stored.get(module)
        if stored is not None:
            return stored.specs()
        shape = names.linear_shape(self.config, names.relative_name(self.config, module))
        return self.scheme(module).specs(*shape)

    @property
    def num_bytes(self) -> int:
        """Size of the weight files."""
        return sum(file.stat().st_size for file in self.weight_files)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, by name."""
        return tuple(sorted({header.file for header in self._headers.values()}))

    @property
    def is_quantized(self) -> bool:
        """Whether any linear of the model has another scheme than dense."""
        return bool(self.quantization)

    def _header(self, name: str) -> Header:
        if name not in self._headers:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._headers[name]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a local folder and checks that it is whole.

    Raises CheckpointError listing every file or tensor that is missing, misshapen or of another type, and
    UnsupportedModelError for an architecture or a quantization that qinfer does not run. Warns of an entry in
    `ignore` that matches nothing.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder: name that of a checkpoint, with config.json in it")
    raw = read_json(path / "config.json")
    config = ModelConfig.from_dict(raw)
    headers = find_tensors(path)
    bare = Checkpoint(path, raw, config, Quantization(), headers)
    described = find_quantization_config(path, raw)
    quantization = dialects.read(described, Folder(path, config, headers, bare.tensor))
    checkpoint = Checkpoint(path, raw, config, quantization, headers)
    check_modules(checkpoint)
    _check_tensors(checkpoint)
    return checkpoint


def check_modules(checkpoint: Checkpoint) -> None:
    """Refuses groups of linears with mixed schemes and names that leave us no weight to read."""
    _check_groups(checkpoint)
    _warn_of_strangers(checkpoint)
    _refuse_quantized_head(checkpoint)
    for name in checkpoint.names():
        if name.endswith(".weight_g_idx"):
            scheme = checkpoint.scheme(name.removesuffix(".weight_g_idx"))
            if not isinstance(scheme, W4A16Ordered):
                raise CheckpointError(
                    f"{checkpoint.path} has {name}, but its quantization_config says nothing of an order "
                    "(actorder: group)"
                )


def _check_groups(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    for i in range(config.num_layers):
        prefix = names.layer_prefix(config, i)
        for group in names.layer_groups(config):
            schemes = {module: checkpoint.scheme(prefix + module) for module in group.modules}
            if len(set(schemes.values())) > 1:
                said = ", ".join(f"{module} {scheme.label}" for module, scheme in schemes.items())
                raise CheckpointError(
                    f"{checkpoint.path}: linears that run as one must have one scheme; {prefix}* has {said}"
                )


def _warn_of_strangers(checkpoint: Checkpoint) -> None:
    """Names in the configuration that are of nothing."""
    config = checkpoint.config
    known = [*names.all_modules(config), "lm_head"]
    if config.num_experts:
        known += [names.layer_prefix(config, i) + names.router(config) for i in range(config.num_layers)]
    for entry in checkpoint.quantization.unmatched(known):
        warnings.warn(
            f"{checkpoint.path}: {entry!r} in quantization_config matches no linear of the model",
            stacklevel=4,
        )


def _refuse_quantized_head(checkpoint: Checkpoint) -> None:
    tied = checkpoint.config.tie_word_embeddings
    if not tied and not isinstance(checkpoint.scheme("lm_head"), Dense):
        raise UnsupportedModelError(
            f"{checkpoint.path} has a quantized lm_head, which is not supported; put it into `ignore`"
        )
    if packed := sorted(name for name in checkpoint.names() if name in _PACKED_HEADS):
        raise UnsupportedModelError(
            f"{checkpoint.path} has a quantized lm_head ({packed[0]}), which is not supported"
        )


def _check_tensors(checkpoint: Checkpoint) -> None:
    missing: list[str] = []
    wrong: list[str] = []
    config = checkpoint.config
    linears = {
        f"{module}.{suffix}": spec
        for module in names.all_modules(config)
        for suffix, spec in checkpoint.module_specs(module).items()
    }
    for name, spec in (_outside_linears(config) | linears).items():
        if name not in checkpoint.names():
            missing.append(name)
            continue
        shape, dtype = checkpoint.header(name)
        dtypes = FLOATS if spec.dtype is None else frozenset({_DTYPES[spec.dtype]})
        same = _without_ones(shape) == _without_ones(spec.shape) if name in linears else shape == spec.shape
        if not same or dtype not in dtypes:
            expected = f"{list(spec.shape)} {'/'.join(sorted(dtypes))}"
            wrong.append(f"{name} is {list(shape)} {dtype}, not {expected}")
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    if problems or wrong:
        raise CheckpointError(f"{checkpoint.path} is not whole: {'; '.join([*problems, *wrong])}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale is written as [] or [1], one per row as [N] or [N, 1], by different tools."""
    return tuple(length for length in shape if length != 1)


def required_tensors(config: ModelConfig, quantization: Quantization) -> dict[str, TensorSpec]:
    """Full name -> shape and dtype (None: any float) of every tensor of a model in our own dialect."""
    tensors = _outside_linears(config)
    for i in range(config.num_layers):
        prefix = names.layer_prefix(config, i)
        for module in names.layer_modules(config):
            specs = quantization.scheme(prefix + module).specs(*names.linear_shape(config, module))
            tensors |= {f"{prefix}{module}.{suffix}": spec for suffix, spec in specs.items()}
    return tensors


def _outside_linears(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors that no scheme has a say in: embeddings, head, norms and biases."""
    shapes = dict(names.global_tensors(config))
    for i in range(config.num_layers):
        shapes |= names.layer_tensors(config, i)
    for module in names.all_modules(config):
        del shapes[f"{module}.weight"]
    return {name: TensorSpec(shape, None) for name, shape in shapes.items()}
