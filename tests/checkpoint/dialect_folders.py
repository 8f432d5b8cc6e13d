"""Folders in other tools' dialects, made of what lies in vectors/ (make_vectors.py says where that is from).

The model is one whose q, k, v, gate and up are [32, 128], as the vectors are; o and down stay dense.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qinfer.testing import tiny_model

VECTORS = Path(__file__).parent / "vectors"
NAMES = sorted(file.stem for file in VECTORS.glob("*.safetensors"))
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 32, "head_dim": 32},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
}
LIKE_THE_VECTORS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)


def vector(name: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """The packer's tensors, what it says that they mean, and its quantization_config."""
    file = VECTORS / f"{name}.safetensors"
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
    return tensors, tensors.pop("expected"), config


def write_folder(
    folder: Path, linears: dict[str, Tensor], config: dict[str, Any] | None, **sizes: Any
) -> Path:
    """A tiny Llama whose vector-like linears are these tensors by suffix, in every layer."""
    tiny_model("llama", folder, **{**SIZES, **sizes})
    tensors = load_file(folder / "model.safetensors")
    for module in modules():
        del tensors[f"{module}.weight"]
        tensors |= {f"{module}.{suffix}": tensor.clone() for suffix, tensor in linears.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        edit_config(folder, quantization_config=config)
    return folder


def modules() -> list[str]:
    return [f"model.layers.{i}.{module}" for i in range(2) for module in LIKE_THE_VECTORS]


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def change_tensors(folder: Path, drop: tuple[str, ...] = (), **add: Tensor) -> None:
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in drop}
    tensors |= {name: tensor.clone() for name, tensor in add.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def token_ids() -> Tensor:
    return torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))
