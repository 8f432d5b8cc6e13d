"""Loads a model to put tasks to it: through the engine that will serve, many questions at a time."""

from __future__ import annotations

from qinfer.backend import model_device
from qinfer.engine.engine import Engine
from qinfer.engine.kv_pool import scales_in
from qinfer.engine.options import EngineOptions
from qinfer.evals.scorer import Scorer
from qinfer.generation_config import default_params
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.reading import OpenModel, Serving

_POOL_TOKENS = 32_768  # what the KV cache holds on a CPU: enough for 64 questions of 512 tokens


def scorer_for(
    model: OpenModel, serving: Serving, *, decoder: Decoder | None = None, progress: bool = False
) -> Scorer:
    """The model as `serving` says, ready to be asked; `decoder` where it is loaded already.

    Raises UserError where the model does not fit into memory.
    """
    checkpoint = model.checkpoint
    device = model_device()
    decoder = decoder or load_decoder(
        checkpoint, device=device, dtype=serving.dtype, lm_head_dtype=serving.lm_head_dtype
    )
    blocks = max(checkpoint.config.context_len, _POOL_TOKENS) // 16
    options = EngineOptions(
        kv_cache_dtype=serving.kv_cache_dtype, num_kv_blocks=blocks if device.type == "cpu" else None
    )
    scales = scales_in(checkpoint) if serving.kv_cache_dtype == "fp8" else None
    engine = Engine(decoder, model.tokenizer, options, kv_scales=scales)
    penalty = default_params(checkpoint.path, "auto", {}).repetition_penalty
    return Scorer(engine, model.tokenizer, repetition_penalty=penalty, progress=progress)
