"""What whoever answers for a model must know of it, apart from what computes it.

The engine may run in another process than those who talk to clients: all of this can be pickled, and reading
it takes no part in computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qinfer.config import ModelConfig
from qinfer.engine.memory import Ledger
from qinfer.engine.options import StepLimits
from qinfer.evals.certificate import GateStatus
from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:  # imports torch, for which a server's port does not wait
    from qinfer.llm import LLM
    from qinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelCard:
    """A loaded model: `names` in the API, `facts` and `cache_facts` in words short enough for labels."""

    names: tuple[str, ...]
    gate: GateStatus
    config: ModelConfig
    path: Path
    tokenizer: Tokenizer
    defaults: SamplingParams
    limits: StepLimits
    vocab_size: int
    ledger: Ledger
    facts: dict[str, str]
    cache_facts: dict[str, str]


def card_of(llm: LLM) -> ModelCard:
    """The card of a model in this process; UserError where it has no tokenizer."""
    return ModelCard(
        names=llm.served_model_names,
        gate=llm.gate,
        config=llm.config,
        path=llm.path,
        tokenizer=llm.get_tokenizer(),
        defaults=llm.get_default_sampling_params(),
        limits=llm.engine.limits,
        vocab_size=llm.engine.vocab_size,
        ledger=llm.engine.ledger,
        facts=model_facts(llm),
        cache_facts=cache_facts(llm),
    )


def model_facts(llm: LLM) -> dict[str, str]:
    """Formats of the weights and the cache; several of them, in one model, are joined by "+".

    `group_size` is empty where scales are not of groups.
    """
    from qinfer.backend import model_device, runs_kernels  # imports torch
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
