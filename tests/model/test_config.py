"""config.json in the spellings that published checkpoints use, and errors that name what is wrong."""

from typing import Any

import pytest

from qinfer.config import SUPPORTED_ARCHITECTURES, ModelConfig, RopeConfig
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.testing import FAMILIES, tiny_config


def scaling_of(rope: RopeConfig) -> dict[str, Any]:
    return dict(rope.scaling)


def test_both_rope_spellings_mean_the_same() -> None:
    old = tiny_config(
        "llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}, partial_rotary_factor=0.5
    )
    new = tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
        },
    )
    config = ModelConfig.from_dict(old)
    assert config == ModelConfig.from_dict(new)
    assert (config.rope.theta, config.rope.kind, config.rope.rotary_dim) == (5e5, "linear", 8)


def test_gemma3_theta_per_layer_type_in_both_spellings() -> None:
    new = ModelConfig.from_dict(tiny_config("gemma3"))
    old = ModelConfig.from_dict(
        tiny_config(
            "gemma3",
            rope_parameters=None,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    )
    assert new == old
    assert new.local_rope == RopeConfig(1e4, "default", 32)
    assert (new.rope.theta, new.rope.kind, scaling_of(new.rope)["factor"]) == (1e6, "linear", 8.0)
    assert new.windows == (16, None)


def test_published_gemma3_text_config_relies_on_defaults() -> None:
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = ModelConfig.from_dict(raw)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (1, 106)
    assert config.tensor_prefix == "language_model.model."
    assert config.rope.theta == 1e6
    assert config.local_rope is not None
    assert config.local_rope.theta == 1e4
    assert config.embedding_multiplier == 2560**0.5


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_early_names_of_longrope_in_phi3(name: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = ModelConfig.from_dict(
        tiny_config("phi3", rope_scaling={"type": name, **factors}, original_max_position_embeddings=64)
    )
    assert config.rope.kind == "longrope"
    assert scaling_of(config.rope)["original_max_position_embeddings"] == 64


def test_context_len_grows_with_yarn_and_dynamic_only() -> None:
    def context_len(rope_scaling: dict[str, Any]) -> int:
        return ModelConfig.from_dict(tiny_config("llama", rope_scaling=rope_scaling)).context_len

    assert context_len({"type": "yarn", "factor": 4.0}) == 1024
    assert context_len({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}) == 256
    assert context_len({"type": "dynamic", "factor": 2.0}) == 512
    assert context_len({"type": "linear", "factor": 2.0}) == 256


def test_mistral_without_a_window_field_has_the_class_default() -> None:
    raw = tiny_config("mistral")
    del raw["sliding_window"]
    assert ModelConfig.from_dict(raw).windows == (4096, 4096)
    assert ModelConfig.from_dict({**raw, "sliding_window": None}).windows == (None, None)


def test_smollm3_flag_one_means_with_rope() -> None:
    assert ModelConfig.from_dict(tiny_config("smollm3")).rotary_layers == (True, False)
    raw = tiny_config("smollm3", no_rope_layers=None, num_hidden_layers=8)
    assert ModelConfig.from_dict(raw).rotary_layers == ((True,) * 3 + (False,)) * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_hashable_values(family: str) -> None:
    config = ModelConfig.from_dict(tiny_config(family))
    assert hash(config) == hash(ModelConfig.from_dict(tiny_config(family)))
    assert len(config.windows) == len(config.rotary_layers) == config.num_layers == 2


def test_unsupported_architecture_is_one_line_naming_the_supported() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelConfig.from_dict(tiny_config("llama", architectures=["GPT2LMHeadModel"]))
    message = str(error.value)
    assert "GPT2LMHeadModel" in message
    assert "\n" not in message
    assert all(name in message for name in SUPPORTED_ARCHITECTURES)


def test_missing_architectures_names_the_model_type() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'llama' without `architectures`"):
        ModelConfig.from_dict(tiny_config("llama", architectures=None))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": 0}, CheckpointError, "hidden_size is 0"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size is 'many'"),
        ({"num_hidden_layers": True}, CheckpointError, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 is not a multiple of num_key_value_heads 3"),
        ({"dtype": "float64"}, UnsupportedModelError, "'float64'.*bfloat16, float16, float32"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "'relu'.*silu"),
        ({"rope_scaling": {"type": "mrope"}}, UnsupportedModelError, "'mrope'.*longrope"),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "'linear' lacks factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            CheckpointError,
            "short_factor has length 1, not 8",
        ),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.from_dict(tiny_config("llama", **changes))


def test_layer_types_must_cover_the_layers() -> None:
    with pytest.raises(CheckpointError, match="1 layer_types for 2 hidden layers"):
        ModelConfig.from_dict(tiny_config("gemma2", layer_types=["full_attention"]))


def test_bidirectional_gemma_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        ModelConfig.from_dict(tiny_config("gemma3", use_bidirectional_attention=True))
