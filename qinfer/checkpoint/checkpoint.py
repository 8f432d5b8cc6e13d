"""A model as a folder of safetensors, opened lazily and checked before anything is computed.

Opening reads config.json and the headers of the weight files, never the weights. It compares what is there
with what the configuration needs (names.py for the model, the scheme for what a quantized linear consists
of) and names everything that is missing or has another shape or type, in one error. A checkpoint that opens
is complete; so loading needs no second look and nothing can be left at a random value.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qinfer.checkpoint import names
from qinfer.checkpoint.compressed_tensors import Quantization, find_quantization_config, read_quantization
from qinfer.checkpoint.files import read_json
from qinfer.checkpoint.shards import Header, find_tensors
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.quant import Dense, Scheme, TensorSpec

CPU = torch.device("cpu")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_DTYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
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

    def module(self, module: str, device: torch.device = CPU) -> dict[str, Tensor]:
        """That linear's tensors by suffix ("weight", "weight_scale"), as its scheme lists them; no bias."""
        relative = ".".join(module.split(".")[-2:])
        specs = self.scheme(module).specs(*names.linear_shape(self.config, relative))
        return {suffix: self.tensor(f"{module}.{suffix}", device) for suffix in specs}

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
        return bool(self.quantization.groups)

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
        raise CheckpointError(f"{path} is not a folder")
    raw = read_json(path / "config.json")
    config = ModelConfig.from_dict(raw)
    quantization = read_quantization(find_quantization_config(path, raw))
    checkpoint = Checkpoint(path, raw, config, quantization, find_tensors(path))
    check_modules(checkpoint)
    _check_tensors(checkpoint)
    return checkpoint


def check_modules(checkpoint: Checkpoint) -> None:
    """Refuses groups of linears with mixed schemes and names that leave us no weight to read."""
    config, quantization = checkpoint.config, checkpoint.quantization
    for i in range(config.num_layers):
        prefix = names.layer_prefix(config, i)
        for group in names.layer_groups(config):
            schemes = {module: checkpoint.scheme(prefix + module) for module in group.modules}
            if len(set(schemes.values())) > 1:
                said = ", ".join(f"{module} {scheme.label}" for module, scheme in schemes.items())
                raise CheckpointError(
                    f"{checkpoint.path}: linears that run as one must have one scheme; {prefix}* has {said}"
                )
    for entry in quantization.unmatched([*names.all_modules(config), "lm_head"]):
        warnings.warn(
            f"{checkpoint.path}: {entry!r} in quantization_config matches no linear of the model",
            stacklevel=3,
        )
    if not config.tie_word_embeddings and not isinstance(checkpoint.scheme("lm_head"), Dense):
        raise UnsupportedModelError(
            f"{checkpoint.path} has a quantized lm_head, which is not supported; put it into `ignore`"
        )
    if any(name.endswith(".weight_g_idx") for name in checkpoint.names()):
        raise UnsupportedModelError(
            f"{checkpoint.path} has reordered groups (weight_g_idx, actorder 'group'), which is not supported"
        )


def _check_tensors(checkpoint: Checkpoint) -> None:
    missing: list[str] = []
    wrong: list[str] = []
    for name, (shape, dtype) in required_tensors(checkpoint.config, checkpoint.quantization).items():
        if name not in checkpoint.names():
            missing.append(name)
            continue
        found_shape, found_dtype = checkpoint.header(name)
        dtypes = _FLOATS if dtype is None else frozenset({_DTYPES[dtype]})
        if found_shape != shape or found_dtype not in dtypes:
            expected = f"{list(shape)} {'/'.join(sorted(dtypes))}"
            wrong.append(f"{name} is {list(found_shape)} {found_dtype}, not {expected}")
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    if problems or wrong:
        raise CheckpointError(f"{checkpoint.path} is not whole: {'; '.join([*problems, *wrong])}")


def required_tensors(config: ModelConfig, quantization: Quantization) -> dict[str, TensorSpec]:
    """Full name -> shape and dtype (None: any float) of every tensor that the model is built from."""
    tensors = {name: TensorSpec(shape, None) for name, shape in names.global_tensors(config).items()}
    for i in range(config.num_layers):
        prefix = names.layer_prefix(config, i)
        dense = names.layer_tensors(config, i)
        for module in names.layer_modules(config):
            dense.pop(f"{prefix}{module}.weight")
            specs = quantization.scheme(prefix + module).specs(*names.linear_shape(config, module))
            tensors |= {f"{prefix}{module}.{suffix}": spec for suffix, spec in specs.items()}
        tensors |= {name: TensorSpec(shape, None) for name, shape in dense.items()}
    return tensors
