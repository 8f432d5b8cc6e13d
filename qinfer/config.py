"""What a decoder is, as data: the fields that tell Llama, Qwen, Gemma and their kin apart.

`ModelConfig.from_dict` reads a `config.json`; the model has one definition and looks at these fields only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer (Su et al. 2021) with its context scaling."""

    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    rotary_dim: int = 0  # leading dimensions of a head that turn
    # the numbers of `rope_scaling` / `rope_parameters`, as in config.json ("factor", "low_freq_factor", ...)
    scaling: tuple[tuple[str, Any], ...] = ()


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
    windows: tuple[int | None, ...] = ()  # per layer
    rotary_layers: tuple[bool, ...] = ()  # per layer; SmolLM3 leaves some without
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim before RoPE (Qwen3, Gemma 3)
    norm_offset: float = 0.0  # 1.0: the norm multiplies by (1 + w) (Gemma)
    sandwich_norms: bool = False  # Gemma 2/3: norms after attention and around the MLP
    fused_projections: bool = False  # Phi-3: qkv_proj and gate_up_proj in the file
    attention_scale: float = 0.0  # multiplies q.k; from_dict fills it in
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tensor_prefix: str = "model."  # before "layers.0..." and "embed_tokens" in the file
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json; raises UnsupportedModelError in one line naming what is supported."""
        raise NotImplementedError
