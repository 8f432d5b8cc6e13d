"""One GGUF file -> a safetensors folder that transformers and qinfer read.

GGUF is the format of llama.cpp: one file with metadata and tensors, most of them quantized in blocks along
the input dimension. Here every tensor is dequantized, once, by the gguf library. What this gives up: the
file's small size; what it gains: one way to run and to quantize every model. The names come from the
library's own table, asked from our side (names.py), so a tensor that the model needs and the file lacks, or
the reverse, is an error.

Two things are stored otherwise than in the original. llama.cpp rotates neighbouring pairs of a head where
transformers rotates halves, so for the architectures below the rows of q and k are interleaved in the file
and are put back. And Gemma's norms, which multiply by 1 + w, are stored as 1 + w.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray

from qinfer.checkpoint import names
from qinfer.checkpoint.files import write_json
from qinfer.checkpoint.gguf_config import GGUFSource, make_config, make_generation_config
from qinfer.checkpoint.gguf_reader import read_gguf
from qinfer.checkpoint.gguf_tokenizer import make_tokenizer
from qinfer.checkpoint.shard_writer import ShardWriter
from qinfer.config import ModelConfig
from qinfer.dtypes import name_of
from qinfer.errors import CheckpointError, UnsupportedModelError

# architectures whose rotary embedding llama.cpp computes on neighbouring pairs
_INTERLEAVED = frozenset({"llama", "smollm3", "granite"})
# say what the configuration says
_ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


def convert_gguf(file: Path, folder: Path, *, progress: Callable[[str], None]) -> None:
    """Writes config.json, safetensors, tokenizer, chat template and generation config into `folder`.

    Quantized and BF16 files become bfloat16, F16 float16, F32 float32. `progress` is told what is done.
    Raises CheckpointError for a file that is cut off or incomplete, UnsupportedModelError for an
    architecture or a tokenizer that is not supported, naming those that are.
    """
    progress(f"reading {file.name}")
    tensors, source = open_gguf(file)
    dtype = _dtype(tensors)
    raw_config = make_config(source, name_of(dtype))
    tokenizer, tokenizer_config = make_tokenizer(source.metadata)
    placed = place(source, ModelConfig.from_dict(raw_config))
    progress(f"converting {len(placed)} tensors to {raw_config['dtype']}")
    writer = ShardWriter(folder)
    for name, stored in placed.items():
        values = original_values(source, raw_config, name, source.values(stored))
        writer.add(name, torch.tensor(values).to(dtype))
    writer.finish()
    write_json(folder / "config.json", raw_config)
    write_json(folder / "generation_config.json", make_generation_config(source.metadata))
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    template = source.metadata.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def open_gguf(file: Path) -> tuple[dict[str, Any], GGUFSource]:
    """The file's tensors as the gguf library has them, and how they read; CheckpointError if cut off."""
    tensors, metadata = read_gguf(file)
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{file} is one of {metadata['split.count']} parts: merge them first (llama-gguf-split --merge)"
        )
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}

    def values(name: str) -> NDArray[np.float32]:
        tensor = tensors[name]
        array: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        return array.astype(np.float32, copy=False).reshape(shapes[name])

    return tensors, GGUFSource(metadata, shapes, values)


def _dtype(tensors: dict[str, Any]) -> torch.dtype:
    kinds = {tensor.tensor_type.name for tensor in tensors.values()}
    if kinds <= {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16


def place(source: GGUFSource, config: ModelConfig) -> dict[str, str]:
    """Our name -> the file's name of every tensor; CheckpointError when one lacks the other."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == source.architecture)
    table = gguf.get_tensor_name_map(arch, config.num_layers)
    wanted = dict(names.global_tensors(config))
    for i in range(config.num_layers):
        wanted |= names.layer_tensors(config, i)
    placed: dict[str, str] = {}
    missing: list[str] = []
    for name, shape in wanted.items():
        stored = table.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if stored not in source.shapes:
            missing.append(stored)
        elif source.shapes[stored] != shape:
            raise CheckpointError(f"GGUF tensor {stored} is {list(source.shapes[stored])}, not {list(shape)}")
        placed[name] = stored
    if missing:
        raise CheckpointError(f"the GGUF file lacks tensors: {', '.join(missing)}")
    if spare := sorted(source.shapes.keys() - set(placed.values()) - _ROPE_TENSORS):
        raise UnsupportedModelError(
            f"the GGUF file has tensors that a {config.architecture} has no place for: {', '.join(spare)}"
        )
    return placed


def original_values(
    source: GGUFSource, config: dict[str, Any], name: str, values: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The values as the model was trained: rows of q and k in halves, Gemma's norms less one."""
    module = name.rsplit(".", 1)[0]
    if source.architecture in _INTERLEAVED and module.endswith((".q_proj", ".k_proj")):
        heads = config["num_attention_heads" if module.endswith(".q_proj") else "num_key_value_heads"]
        return undo_interleaving(values, heads)
    if source.architecture.startswith("gemma") and module.endswith("norm"):
        return values - np.float32(1.0)
    return values


def undo_interleaving(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads * d, ...] in the order 0, d/2, 1, d/2 + 1, ... of each head -> 0, 1, ..., d - 1."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
