"""config.json and generation_config.json of a model that comes as one GGUF file.

A GGUF file has no config.json: its metadata says the same under llama.cpp's names, `llama.block_count` for
`num_hidden_layers`. What the metadata leaves out is taken from the shapes of the tensors (head size, biases,
tied embeddings), or is fixed for the architecture in llama.cpp itself (Gemma's attention scale by model
size, every which layer is local). Numbers are stored as float32: 1e-5 is read as 1e-5, not 9.99999974e-06.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qinfer.errors import CheckpointError, UnsupportedModelError

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # of tensors by GGUF name, in PyTorch's order
Values = Callable[[str], NDArray[np.float32]]

# the published scaling of Llama 3.1 to 3.3; a file holds only the factors that follow from it
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


class GGUFSource(NamedTuple):
    """What a GGUF file says, apart from its weights: `values` reads one tensor in float32."""

    metadata: Metadata
    shapes: Shapes
    values: Values

    @property
    def architecture(self) -> str:
        """llama.cpp's name, such as "qwen2"."""
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Value of an architecture's key, "block_count"; float32 as its shortest decimal."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def size(self, key: str) -> int:
        """A whole number that must be there, and be one for all layers."""
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            raise CheckpointError(
                f"GGUF metadata: {self.architecture}.{key} is {value!r}, not a whole number"
            )
        return value


class _Family(NamedTuple):
    architecture: str  # as transformers names the class
    model_type: str
    own: Callable[[GGUFSource, dict[str, Any]], dict[str, Any]]


def make_config(source: GGUFSource, dtype: str) -> dict[str, Any]:
    """config.json as transformers and `ModelConfig.from_dict` read it; `dtype` as in "bfloat16".

    Raises UnsupportedModelError naming the architectures that can be read.
    """
    family = _FAMILIES.get(source.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"GGUF architecture {source.architecture!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    if source.get("expert_count", 0):
        raise UnsupportedModelError(f"GGUF {source.architecture} with experts (MoE) is not supported")
    num_heads = source.size("attention.head_count")
    num_kv_heads = (
        source.size("attention.head_count_kv") if source.get("attention.head_count_kv") else num_heads
    )
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "vocab_size": source.shapes["token_embd.weight"][0],
        "hidden_size": source.size("embedding_length"),
        "intermediate_size": source.size("feed_forward_length"),
        "num_hidden_layers": source.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": _head_dim(source, num_heads, num_kv_heads),
        "max_position_embeddings": source.size("context_length"),
        "rms_norm_eps": source.get("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in source.shapes,
        "use_cache": True,
        **_special_ids(source.metadata),
    }
    config["rope_parameters"] = _rope(source, config)
    return config | family.own(source, config)


def make_generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: every id that ends a turn, and the sampling that the file recommends."""
    config = _special_ids(metadata)
    for key, name in (
        ("temp", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ):
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            config |= {name: float(str(np.float32(value))) if isinstance(value, float) else value}
            config["do_sample"] = True
    return config


def _special_ids(metadata: Metadata) -> dict[str, Any]:
    """bos, pad and eos ids; eos is a list when the end of a turn or a message has an id of its own."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    ends = [ids["eos"], *(metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
    return {name: value for name, value in found.items() if value is not None}


def _head_dim(source: GGUFSource, num_heads: int, num_kv_heads: int) -> int:
    if "blk.0.attn_qkv.weight" in source.shapes:
        return source.shapes["blk.0.attn_qkv.weight"][0] // (num_heads + 2 * num_kv_heads)
    if "blk.0.attn_q.weight" in source.shapes:
        return source.shapes["blk.0.attn_q.weight"][0] // num_heads
    raise CheckpointError("the GGUF file has no tensor blk.0.attn_q.weight")


def _rope(source: GGUFSource, config: Mapping[str, Any]) -> dict[str, Any]:
    theta = source.get("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    turned = source.get("rope.dimension_count") or config["head_dim"]
    if turned != config["head_dim"]:
        rope["partial_rotary_factor"] = turned / config["head_dim"]
    kind = source.get("rope.scaling.type", "none")
    original = source.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in source.shapes:
        return rope | _llama3(source.values("rope_freqs.weight"), theta)
    if "rope_factors_long.weight" in source.shapes:
        factors = {
            f"{name}_factor": source.values(f"rope_factors_{name}.weight") for name in ("long", "short")
        }
        rope |= {name: [float(str(value)) for value in values] for name, values in factors.items()}
        return rope | {"rope_type": "longrope", "original_max_position_embeddings": original}
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": source.get("rope.scaling.factor")}
        return rope | ({"original_max_position_embeddings": original} if original else {})
    if kind not in ("none", "longrope"):
        raise UnsupportedModelError(f"GGUF rope scaling {kind!r} is not supported; none, linear, yarn are")
    return rope


def _llama3(factors: NDArray[np.float32], theta: float) -> dict[str, Any]:
    """The scaling of Llama 3.1 whose factors these are; UnsupportedModelError when they are of another."""
    factor = float(factors.max())
    low, high, original = _LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModelError("the GGUF file's rope_freqs are not those of Llama 3.1's scaling")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in source.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in source.shapes,
    }


def _smollm3(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    turns = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    return {**_llama(source, config), "no_rope_layers": turns, "use_sliding_window": False}


def _granite(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_llama(source, config),
        "attention_multiplier": source.get("attention.scale"),
        "embedding_multiplier": source.get("embedding_scale", 1.0),
        "residual_multiplier": source.get("residual_scale", 1.0),
        "logits_scaling": source.get("logit_scale", 1.0),
    }


def _qwen(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _gemma2(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(source, config, large=_GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": source.get("attn_logit_softcapping"),
        "final_logit_softcapping": source.get("final_logit_softcapping"),
        "layer_types": _local_layers(config, every=2),
    }


def _gemma3(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_theta": source.get("rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    return {
        **_gemma(source, config, large=_GEMMA3_27B_LAYERS),
        "final_logit_softcapping": source.get("final_logit_softcapping"),
        "layer_types": _local_layers(config, every=source.get("attention.sliding_window_pattern", 6)),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _gemma(source: GGUFSource, config: dict[str, Any], *, large: int) -> dict[str, Any]:
    head_dim = config["head_dim"]
    if config["num_hidden_layers"] == large:  # the one size that scales by the model's width
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": source.size("attention.sliding_window"),
    }


def _local_layers(config: dict[str, Any], *, every: int) -> list[str]:
    """Every `every`-th layer sees everything."""
    return [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]


def _phi3(source: GGUFSource, config: dict[str, Any]) -> dict[str, Any]:
    original = source.get("rope.scaling.original_context_length") or config["max_position_embeddings"]
    window = source.get("attention.sliding_window")
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", _llama),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "phi3": _Family("Phi3ForCausalLM", "phi3", _phi3),
    "smollm3": _Family("SmolLM3ForCausalLM", "smollm3", _smollm3),
    "granite": _Family("GraniteForCausalLM", "granite", _granite),
}
