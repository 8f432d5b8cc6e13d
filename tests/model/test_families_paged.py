"""Every family through the engine's paged cache, in chunks and token by token: transformers' logits again.

Prompts are longer than the sliding windows and than several pages; a page holds four tokens, so chunks of 7
begin and end inside pages.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.model.decoder import load_decoder
from qinfer.testing import FAMILIES, error_ratio, tiny_model

LENGTH = 50
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "attention_bias": True},
    ),
    "phi3-window-partial-rotary": ("phi3", {"sliding_window": 16, "partial_rotary_factor": 0.5}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "llama-dynamic": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    ),
    "qwen2_5-yarn": (
        "qwen2_5",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
}


@pytest.mark.parametrize("chunk", [1, 7], ids=["token-by-token", "chunks-of-7"])
@pytest.mark.parametrize("name", MODELS)
def test_paged_logits_equal_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    path = tiny_model(family, tmp_path, **changes)
    token_ids = torch.randint(0, 384, (LENGTH,), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    options = EngineOptions(
        max_model_len=LENGTH, max_num_seqs=1, max_num_batched_tokens=chunk, block_size=4, num_kv_blocks=20
    )
    engine = Engine(load_decoder(open_checkpoint(path)), None, options)
    out = torch.cat(list(engine.prompt_logits(token_ids.tolist())))
    assert (out - expected).abs().max() < 1e-4
    assert error_ratio(out, expected) < 1e-5
