"""What a decoder is, as data: the fields that tell Llama, Qwen, Gemma and their kin apart.

`ModelConfig.from_dict` reads a `config.json`; the model has one definition and looks at these fields only.
What an architecture's name decides, and what its file may leave out, stands in `qinfer.families`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qinfer.config_types import check_fields, check_outer
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.families import (
    DEFAULTS,
    FAMILIES,
    OUTER_FIELDS,
    SUPPORTED_ARCHITECTURES,
    Experts,
    Family,
)
from qinfer.rope_config import RopeConfig, positive_int, read_ropes

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """One decoder, all families. Counts are in units, lengths in tokens, `window` None = full attention."""

    architecture: str  # "LlamaForCausalLM"
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    tie_word_embeddings: bool
    dtype: str  # "bfloat16" | "float16" | "float32": the checkpoint's
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # Gemma 3: layers with a window
    windows: tuple[int | None, ...] = ()  # per layer; a token sees this many tokens, itself among them
    rotary_layers: tuple[bool, ...] = ()  # per layer; SmolLM3 leaves some without
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim before RoPE (Qwen3, Gemma 3)
    norm_offset: float = 0.0  # 1.0: the norm multiplies by (1 + w) (Gemma)
    sandwich_norms: bool = False  # Gemma 2/3: norms after attention and around the MLP
    fused_projections: bool = False  # Phi-3: qkv_proj and gate_up_proj in the file
    num_experts: int = 0  # of every layer; intermediate_size is then that of each
    experts_per_token: int = 0
    renormalize_experts: bool = True  # the weights of a token's experts are scaled to a sum of 1
    expert_names: Experts | None = None
    attention_scale: float = 0.0  # multiplies q.k; from_dict fills it in
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tensor_prefix: str = "model."  # before "layers.0..." and "embed_tokens" in the file
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def context_len(self) -> int:
        """Longest sequence that the model is meant for, in tokens: scaling by yarn or dynamic extends it."""
        scaling = dict(self.rope.scaling)
        if self.rope.kind == "yarn":
            return max(
                self.max_position_embeddings,
                int(scaling["original_max_position_embeddings"] * scaling["factor"]),
            )
        if self.rope.kind == "dynamic":
            return int(self.max_position_embeddings * scaling["factor"])
        return self.max_position_embeddings

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json.

        Raises UnsupportedModelError in one line naming what is supported, and CheckpointError where a field
        is missing or contradicts another.
        """
        check_outer(raw)
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        if raw.get("text_config"):  # the language part of a vision model; its dtype may stand outside
            outer = {key: raw[key] for key in OUTER_FIELDS if raw.get(key) is not None}
            raw = {**outer, **raw["text_config"]}
        raw = {**DEFAULTS, **family.defaults, **raw}
        check_fields(raw)
        _refuse_unsupported(architecture, family, raw)

        names = family.experts
        num_layers = positive_int(raw, "num_hidden_layers")
        hidden_size = positive_int(raw, "hidden_size")
        num_heads, num_kv_heads, head_dim = _heads(raw, hidden_size)
        attention_bias = bool(raw["attention_bias"]) and family.reads_attention_bias
        rope, local_rope = read_ropes(raw, head_dim, phi=architecture == "Phi3ForCausalLM")
        return cls(
            architecture=architecture,
            model_type=str(raw.get("model_type", "")),
            vocab_size=positive_int(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(raw, names.size if names else "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positive_int(raw, "max_position_embeddings"),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            activation=_activation(raw),
            tie_word_embeddings=bool(raw["tie_word_embeddings"]),
            dtype=_dtype(raw),
            rope=rope,
            local_rope=local_rope,
            windows=_windows(raw, num_layers, family),
            rotary_layers=_rotary_layers(raw, num_layers, family),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(raw["mlp_bias"]) and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            norm_offset=1.0 if family.gemma else 0.0,
            sandwich_norms=family.gemma,
            fused_projections=family.fused_projections,
            num_experts=positive_int(raw, names.count) if names else 0,
            experts_per_token=positive_int(raw, "num_experts_per_tok") if names else 0,
            renormalize_experts=bool(raw[names.renormalize]) if names and names.renormalize else True,
            expert_names=names,
            attention_scale=_attention_scale(raw, head_dim),
            attention_softcap=raw.get("attn_logit_softcapping") if family.attention_softcap else None,
            logits_softcap=raw.get("final_logit_softcapping") if family.gemma else None,
            embedding_multiplier=math.sqrt(hidden_size) if family.gemma else raw["embedding_multiplier"],
            residual_multiplier=float(raw["residual_multiplier"]),
            logits_divisor=float(raw["logits_scaling"]),
            tensor_prefix=family.tensor_prefix,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_ids(raw.get("eos_token_id")),
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    found = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r} without `architectures`"
    raise UnsupportedModelError(
        f"qinfer does not run {found}; it runs {', '.join(SUPPORTED_ARCHITECTURES)} "
        "(Llama 2/3, SmolLM2 and others of their shape are LlamaForCausalLM)"
    )


def _heads(raw: Mapping[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Heads, key heads and the width of each; CheckpointError where they do not fit together."""
    num_heads = positive_int(raw, "num_attention_heads")
    head_dim = positive_int(raw, "head_dim") if raw.get("head_dim") else hidden_size // num_heads
    num_kv_heads = positive_int(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if not head_dim:
        raise CheckpointError(f"config.json: hidden_size {hidden_size} for {num_heads} attention heads")
    return num_heads, num_kv_heads, head_dim


def _refuse_unsupported(architecture: str, family: Family, raw: Mapping[str, Any]) -> None:
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"this {architecture} attends in both directions (use_bidirectional_attention); "
            "qinfer runs causal decoders only"
        )

    sparse = family.experts is not None
    if sparse and (raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1):
        raise UnsupportedModelError(
            f"this {architecture} has layers without experts (mlp_only_layers, decoder_sparse_step); qinfer "
            "runs those alone that have them in every layer"
        )


def _activation(raw: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
    name = raw.get("hidden_activation") or raw["hidden_act"]
    if name == "silu":
        return "silu"
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return "gelu_tanh"
    raise UnsupportedModelError(f"activation {name!r} is not supported; silu and gelu_pytorch_tanh are")


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UnsupportedModelError(
            f"config.json: dtype {name!r} is not supported; bfloat16, float16, float32 are"
        )
    return name


def _attention_scale(raw: Mapping[str, Any], head_dim: int) -> float:
    if "attention_multiplier" in raw:
        return float(raw["attention_multiplier"])
    return 1.0 / math.sqrt(raw.get("query_pre_attn_scalar") or head_dim)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rotary_layers(raw: Mapping[str, Any], num_layers: int, family: Family) -> tuple[bool, ...]:
    if not family.no_rope_layers:
        return (True,) * num_layers
    flags = raw.get("no_rope_layers")  # in spite of its name, 1 marks a layer WITH rotary embedding
    if flags is None:
        interval = positive_int(raw, "no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if len(flags) < num_layers:
        raise CheckpointError(f"config.json: {len(flags)} no_rope_layers for {num_layers} hidden layers")
    return tuple(map(bool, flags[:num_layers]))


def _windows(raw: Mapping[str, Any], num_layers: int, family: Family) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if family.windows == "none" or not raw.get("use_sliding_window", True) or window is None:
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    types = raw.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise CheckpointError(f"config.json: {len(types)} layer_types for {num_layers} hidden layers")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.gemma:
        pattern = positive_int(raw, "sliding_window_pattern")
        return tuple(window if (i + 1) % pattern else None for i in range(num_layers))
    if family.no_rope_layers:
        return tuple(None if turns else window for turns in _rotary_layers(raw, num_layers, family))
    first = raw["max_window_layers"]
    if first is None:
        raise CheckpointError("config.json: max_window_layers is null; it must be a whole number")
    return tuple(window if i >= first else None for i in range(num_layers))
