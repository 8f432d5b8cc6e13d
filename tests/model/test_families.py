"""Every family's logits are transformers' in float32, over whole prompts, with every rope scaling.

The models are random and have two layers; prompts are longer than the sliding windows (16) and, where rope is
scaled, longer than the context that it was scaled from.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.testing import FAMILIES, error_ratio, tiny_config, tiny_model

TOLERANCE = 1e-4


def transformers_logits(path: Path, token_ids: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(token_ids).logits


def decoder_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """[B, T] -> [B, T, V]; the batch lies in one row, as everything does in the decoder."""
    num_sequences, length = token_ids.shape
    positions = torch.arange(length).repeat(num_sequences)
    with torch.inference_mode():
        hidden = decoder.forward(token_ids.flatten(), positions, CausalAttention(num_sequences))
        return decoder.logits(hidden).view(num_sequences, length, -1)


def prompt(num_sequences: int, length: int) -> Tensor:
    return torch.randint(0, 384, (num_sequences, length), generator=torch.Generator().manual_seed(1))


def check(path: Path, token_ids: Tensor) -> None:
    decoder = load_decoder(open_checkpoint(path))
    decoder.set_context_len(token_ids.shape[1])
    out, expected = decoder_logits(decoder, token_ids), transformers_logits(path, token_ids)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < TOLERANCE
    assert error_ratio(out, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    check(tiny_model(family, tmp_path), prompt(2, 50))


BIASED = {"attention_bias": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama3", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama3", {"head_dim": 32}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": ("qwen3", BIASED),
    "gemma2-no-softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 3.0, "attention_bias": True}),
    "gemma3-untied": ("gemma3", {"tie_word_embeddings": False}),
    "gemma3-old-spelling": (
        "gemma3",
        {
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 5000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "layer_types": None,
            "sliding_window_pattern": 2,
        },
    ),
    "mistral-full-attention": ("mistral", {"sliding_window": None}),
    "phi3-window": ("phi3", {"sliding_window": 16}),
    "phi3-partial-rotary": ("phi3", {"partial_rotary_factor": 0.5}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3-window-without-rope": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    "smollm3-interval": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    check(tiny_model(family, tmp_path, **changes), prompt(1, 50))


LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}),
    "yarn": ("qwen2_5", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}),
    "yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
            }
        },
    ),
    "llama3": (
        "llama3",
        {
            "rope_theta": 100.0,  # so that all three bands of llama3 have pairs in a head of 16
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}),
    "longrope-attention-factor": (
        "phi3",
        {
            "rope_scaling": {**LONGROPE, "attention_factor": 1.3},
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("length", [40, 100], ids=["within", "beyond"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_equal_transformers(scaling: str, length: int, tmp_path: Path) -> None:
    family, changes = SCALINGS[scaling]
    check(tiny_model(family, tmp_path, **changes), prompt(1, length))


def test_text_part_of_a_vision_checkpoint(tmp_path: Path) -> None:
    """Gemma3ForConditionalGeneration: sizes in text_config, names under language_model."""
    text = {k: v for k, v in tiny_config("gemma3").items() if k != "architectures"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=1,
        image_token_index=380,
        boi_token_index=381,
        eoi_token_index=382,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    token_ids = torch.randint(0, 380, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(token_ids).logits
    out = decoder_logits(load_decoder(open_checkpoint(tmp_path)), token_ids)
    assert error_ratio(out, expected) < 1e-5
