"""The supported architectures as data: what a name decides, and what its config.json may leave out.

transformers may leave out a field that equals its class's default, so published files rely on those defaults:
Mistral's window of 4096, even Gemma 3's sizes. They are repeated here, per architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Experts:
    """How the experts of a mixture (Shazeer et al. 2017) are called, in config.json and in the file."""

    count: str  # the key of config.json that says how many there are
    size: str  # and the one that says how wide each is
    block: str  # where they lie in a layer, beside their router `gate`
    linears: tuple[str, str, str]  # gate, up and down of each
    renormalize: str | None = None  # the key that says whether chosen weights are scaled to 1; None: they are


@dataclass(frozen=True)
class Family:
    """What the architecture's name alone decides, and the defaults of its config.json."""

    defaults: Mapping[str, Any]
    windows: Literal["none", "all", "typed"] = "none"  # typed: by layer_types
    no_rope_layers: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    attention_softcap: bool = False
    fused_projections: bool = False
    experts: Experts | None = None
    tensor_prefix: str = "model."


DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "default_theta": 10_000.0,
    "default_local_theta": None,  # not None: layers with a window turn by their own theta
}
OUTER_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# published text_configs leave out whatever equals the class default, sizes too
_GEMMA3 = {
    **_GEMMA,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "default_theta": 1_000_000.0,
    "default_local_theta": 10_000.0,
    "sliding_window_pattern": 6,
}
_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        {**_LLAMA_IDS, "max_position_embeddings": 2048}, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": Family(
        {**_LLAMA_IDS, "max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
        windows="all",
    ),
    "Qwen2ForCausalLM": Family({**_QWEN, "max_position_embeddings": 32_768}, windows="typed", qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        {**_QWEN, "max_position_embeddings": 32_768, "head_dim": 128},
        windows="typed",
        reads_attention_bias=True,
        qk_norm=True,
    ),
    "Gemma2ForCausalLM": Family(
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windows="typed",
        reads_attention_bias=True,
        gemma=True,
        attention_softcap=True,
    ),
    "Gemma3ForCausalLM": Family(
        _GEMMA3, windows="typed", reads_attention_bias=True, gemma=True, qk_norm=True
    ),
    "Gemma3ForConditionalGeneration": Family(
        _GEMMA3,
        windows="typed",
        reads_attention_bias=True,
        gemma=True,
        qk_norm=True,
        tensor_prefix="language_model.model.",
    ),
    "SmolLM3ForCausalLM": Family(
        {
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "default_theta": 2_000_000.0,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        windows="typed",
        no_rope_layers=True,
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
    "Phi3ForCausalLM": Family(
        {
            "bos_token_id": 1,
            "eos_token_id": 32_000,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        windows="all",
        fused_projections=True,
    ),
    "MixtralForCausalLM": Family(
        {
            **_LLAMA_IDS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "default_theta": 1_000_000.0,
        },
        windows="all",
        experts=Experts("num_local_experts", "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        windows="all",
        reads_attention_bias=True,
        qk_norm=True,
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            "mlp",
            ("gate_proj", "up_proj", "down_proj"),
            "norm_topk_prob",
        ),
    ),
    "GraniteForCausalLM": Family(
        {**_LLAMA_IDS, "max_position_embeddings": 2048, "attention_multiplier": 1.0},
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
}
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(FAMILIES)
