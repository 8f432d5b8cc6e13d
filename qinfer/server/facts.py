"""What is served, in words short enough for labels: formats, dtypes, and how ops run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qinfer.llm import LLM


def model_facts(llm: LLM) -> dict[str, str]:
    """Formats of the weights and the cache; several of them, in one model, are joined by "+".

    `group_size` is empty where scales are not of groups.
    """
    from qinfer.backend import model_device, runs_kernels  # imports torch: a server takes its port before
    from qinfer.quant import Dense

    compute = str(llm.dtype).removeprefix("torch.")
    weights = [(scheme.group() or {}).get("weights") or {} for scheme in llm.schemes]
    bits = [str(one.get("num_bits") or 8 * llm.dtype.itemsize) for one in weights]
    groups = [str(one["group_size"]) for one in weights if one.get("group_size")]
    return {
        "quantization": "none" if list(llm.schemes) == [Dense()] else _joined(s.name for s in llm.schemes),
        "weight_bits": _joined(bits),
        "group_size": _joined(groups),
        "kv_cache_dtype": llm.engine.kv_cache_dtype,
        "compute_dtype": compute,
        "backend": "triton" if model_device().type != "cpu" and runs_kernels() else "torch",
    }


def cache_facts(llm: LLM) -> dict[str, str]:
    """The KV cache in vLLM's words, which routers that score by prefixes read."""
    engine, ledger = llm.engine, llm.engine.ledger
    return {
        "block_size": str(ledger.block_size),
        "cache_dtype": engine.kv_cache_dtype,
        "enable_prefix_caching": str(engine.pages.caching),
        "kv_cache_size_tokens": str(ledger.tokens),
        "num_gpu_blocks": str(ledger.pages),
    }


def _joined(words: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(words))
