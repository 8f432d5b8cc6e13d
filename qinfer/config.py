"""What a decoder is, as data: the fields that tell Llama, Qwen, Gemma and their kin apart.

`ModelConfig.from_dict` reads a `config.json`; the model has one definition and looks at these fields only.
A family is a row of `_FAMILIES`: what is fixed for it, and what its config.json may leave out because
transformers fills it in. Both spellings of the rotary embedding are read: `rope_theta` with `rope_scaling`
(transformers 4) and `rope_parameters` (transformers 5), the latter also per type of layer (Gemma 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from qinfer.errors import CheckpointError, UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer (Su et al. 2021) with its context scaling."""

    theta: float
    kind: RopeKind = "default"
    rotary_dim: int = 0  # leading dimensions of a head that turn
    # the numbers of `rope_scaling` / `rope_parameters`, as in config.json ("factor", "low_freq_factor", ...),
    # with "max_position_embeddings" and "original_max_position_embeddings" settled
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
    windows: tuple[int | None, ...] = ()  # per layer; a token sees this many tokens, itself among them
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
        architecture = _architecture(raw)
        family = _FAMILIES[architecture]
        if "text_config" in raw:  # the language part of a vision model; its dtype may stand outside
            outer = {key: raw[key] for key in _OUTER_FIELDS if raw.get(key) is not None}
            raw = {**outer, **raw["text_config"]}
        raw = {**_DEFAULTS, **family.defaults, **raw}
        _refuse_unsupported(architecture, raw)

        num_layers = _size(raw, "num_hidden_layers")
        num_heads = _size(raw, "num_attention_heads")
        hidden_size = _size(raw, "hidden_size")
        head_dim = _size(raw, "head_dim") if raw.get("head_dim") else hidden_size // num_heads
        num_kv_heads = _size(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_heads
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        attention_bias = bool(raw["attention_bias"]) and family.reads_attention_bias
        rope, local_rope = _ropes(raw, head_dim, phi="Phi3" in architecture)
        return cls(
            architecture=architecture,
            model_type=str(raw.get("model_type", "")),
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_size(raw, "max_position_embeddings"),
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
            attention_scale=_attention_scale(raw, head_dim),
            attention_softcap=raw.get("attn_logit_softcapping") if family.attention_softcap else None,
            logits_softcap=raw.get("final_logit_softcapping") if family.gemma else None,
            embedding_multiplier=math.sqrt(hidden_size)
            if family.gemma
            else float(raw["embedding_multiplier"]),
            residual_multiplier=float(raw["residual_multiplier"]),
            logits_divisor=float(raw["logits_scaling"]),
            tensor_prefix=family.tensor_prefix,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_ids(raw.get("eos_token_id")),
        )


@dataclass(frozen=True)
class _Family:
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
    tensor_prefix: str = "model."


_DEFAULTS: dict[str, Any] = {
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
_OUTER_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
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
_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(
        {**_LLAMA_IDS, "max_position_embeddings": 2048}, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": _Family(
        {**_LLAMA_IDS, "max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
        windows="all",
    ),
    "Qwen2ForCausalLM": _Family({**_QWEN, "max_position_embeddings": 32_768}, windows="typed", qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        {**_QWEN, "max_position_embeddings": 32_768, "head_dim": 128},
        windows="typed",
        reads_attention_bias=True,
        qk_norm=True,
    ),
    "Gemma2ForCausalLM": _Family(
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
    "Gemma3ForCausalLM": _Family(
        _GEMMA3, windows="typed", reads_attention_bias=True, gemma=True, qk_norm=True
    ),
    "Gemma3ForConditionalGeneration": _Family(
        _GEMMA3,
        windows="typed",
        reads_attention_bias=True,
        gemma=True,
        qk_norm=True,
        tensor_prefix="language_model.model.",
    ),
    "SmolLM3ForCausalLM": _Family(
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
    "Phi3ForCausalLM": _Family(
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
    "GraniteForCausalLM": _Family(
        {**_LLAMA_IDS, "max_position_embeddings": 2048, "attention_multiplier": 1.0},
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
}
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)

_ROPE_OWN_FIELDS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return str(name)
    found = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r} without `architectures`"
    raise UnsupportedModelError(
        f"qinfer does not run {found}; it runs {', '.join(SUPPORTED_ARCHITECTURES)} "
        "(Llama 2/3, SmolLM2 and others of their shape are LlamaForCausalLM)"
    )


def _refuse_unsupported(architecture: str, raw: Mapping[str, Any]) -> None:
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"this {architecture} attends in both directions (use_bidirectional_attention); "
            "qinfer runs causal decoders only"
        )


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a positive whole number")
    return value


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


def _rotary_layers(raw: Mapping[str, Any], num_layers: int, family: _Family) -> tuple[bool, ...]:
    if not family.no_rope_layers:
        return (True,) * num_layers
    flags = raw.get("no_rope_layers")  # in spite of its name, 1 marks a layer WITH rotary embedding
    if flags is None:
        return tuple((i + 1) % raw["no_rope_layer_interval"] != 0 for i in range(num_layers))
    return tuple(map(bool, flags[:num_layers]))


def _windows(raw: Mapping[str, Any], num_layers: int, family: _Family) -> tuple[int | None, ...]:
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
        pattern = raw["sliding_window_pattern"]
        return tuple(window if (i + 1) % pattern else None for i in range(num_layers))
    if family.no_rope_layers:
        return tuple(None if turns else window for turns in _rotary_layers(raw, num_layers, family))
    return tuple(window if i >= raw["max_window_layers"] else None for i in range(num_layers))


def _ropes(raw: Mapping[str, Any], head_dim: int, *, phi: bool) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of all layers, and of those with a window where it is another."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta") or raw["default_theta"]
    local_theta = raw.get("rope_local_base_freq") or raw["default_local_theta"]
    nested = "full_attention" in parameters or "sliding_attention" in parameters
    local: Mapping[str, Any] = {}
    if nested:
        parameters, local = (parameters.get(k) or {} for k in ("full_attention", "sliding_attention"))
    rope = _rope({"rope_theta": theta, **parameters}, raw, head_dim, phi=phi)
    if local_theta is None and not local:
        return rope, None
    return rope, _rope({"rope_theta": local_theta or theta, **local}, raw, head_dim, phi=phi)


def _rope(parameters: Mapping[str, Any], raw: Mapping[str, Any], head_dim: int, *, phi: bool) -> RopeConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "su" or (phi and kind == "yarn"):  # early names of longrope in Phi-3's own files
        kind = "longrope"
    if kind not in _ROPE_NEEDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; qinfer knows {', '.join(_ROPE_NEEDS)}"
        )
    fraction = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * fraction)
    scaling = {k: v for k, v in parameters.items() if v is not None and k not in _ROPE_OWN_FIELDS}
    missing = [key for key in _ROPE_NEEDS[kind] if key not in scaling]
    if missing:
        raise CheckpointError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}")
    for key in ("short_factor", "long_factor"):
        if key in scaling:
            scaling[key] = tuple(scaling[key])
            if len(scaling[key]) != rotary_dim // 2:
                raise CheckpointError(
                    f"config.json: rope scaling's {key} has length {len(scaling[key])}, not {rotary_dim // 2}"
                )
    if kind != "default":
        longest = _size(raw, "max_position_embeddings")
        scaling["max_position_embeddings"] = longest
        original = raw.get("original_max_position_embeddings")  # Phi-3 keeps it outside, and it rules there
        scaling["original_max_position_embeddings"] = (
            original or scaling.get("original_max_position_embeddings") or longest
        )
    theta = float(parameters["rope_theta"])
    return RopeConfig(theta, cast(RopeKind, kind), rotary_dim, tuple(sorted(scaling.items())))
