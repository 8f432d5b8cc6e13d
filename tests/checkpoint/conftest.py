"""Writes tiny models as llama.cpp's converter would, from the formats' description."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
ARCHITECTURES = {  # family of qinfer.testing -> llama.cpp's architecture
    "llama": "llama",
    "llama3": "llama",
    "smollm2": "llama",
    "qwen2": "qwen2",
    "qwen2_5": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
}
INTERLEAVED = ("llama", "smollm3", "granite")


def stored(arch: str, name: str, values: np.ndarray, raw: dict[str, Any]) -> np.ndarray:
    """The values as the file holds them: rotated pairs next to each other, Gemma's norms plus one."""
    if arch in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
        heads = raw["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rows = values.reshape(heads, 2, -1, *values.shape[1:])  # first half, second half
        half = rows.shape[2]
        mixed = [row for head in rows for i in range(half) for row in (head[0, i], head[1, i])]
        return np.stack(mixed).reshape(values.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def byte_level_metadata(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def model_metadata(writer: gguf.GGUFWriter, arch: str, raw: dict[str, Any], head_dim: int) -> None:
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    ropes = raw.get("rope_parameters", {})
    theta = ropes.get("full_attention", ropes).get("rope_theta") or raw.get("rope_theta") or 10000.0
    writer.add_rope_freq_base(theta)
    if arch in ("gemma2", "gemma3"):
        writer.add_key_length(head_dim)
        writer.add_sliding_window(raw["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(ropes["full_attention"]["factor"])
    if arch == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])


Extra = Callable[[gguf.GGUFWriter], None]
WriteGGUF = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """write(family, folder, kind="F32", skip=(), extra=None) -> the model of `folder` as a .gguf file."""

    def write(
        family: str,
        folder: Path,
        *,
        kind: str = "F32",
        skip: tuple[str, ...] = (),
        extra: Extra | None = None,
    ) -> Path:
        arch = ARCHITECTURES[family]
        raw = json.loads((folder / "config.json").read_text())
        head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        file = tmp_path / f"{family}.gguf"
        writer = gguf.GGUFWriter(file, arch)
        model_metadata(writer, arch, raw, head_dim)
        byte_level_metadata(writer, folder)
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        table = gguf.get_tensor_name_map(number, raw["num_hidden_layers"])
        quant = gguf.GGMLQuantizationType[kind]
        for name, values in load_file(folder / "model.safetensors").items():
            target = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if target in skip:
                continue
            data = stored(arch, name, values, raw)
            if data.ndim == 2 and kind != "F32":
                writer.add_tensor(target, gguf.quants.quantize(data, quant), raw_dtype=quant)
            else:
                writer.add_tensor(target, data)
        if extra is not None:
            extra(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write
