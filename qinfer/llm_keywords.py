"""Keywords of `LLM` and its methods that other engines know: which are options, harmless, or not there.

A script written for vLLM runs unchanged or fails at once with the name of what is missing. A keyword asking
for nothing (its default) is accepted; one that nobody knows is a TypeError, as a typing error should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from qinfer.engine.footprint import parse_size
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError

# vLLM's keywords that change nothing here, and those that qinfer lacks, with the value that asks for nothing
_WITHOUT_EFFECT = frozenset({"trust_remote_code", "disable_log_stats"})
_ABSENT: dict[str, Any] = {
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "distributed_executor_backend": None,
    "cpu_offload_gb": 0,
    "hf_overrides": None,
    "structured_outputs_config": None,
    "compilation_config": None,
    "attention_config": None,
    "quantization_config": None,
    "logits_processors": None,
    "speculative_config": None,
    "enable_lora": False,
}
ABSENT_METHODS = frozenset(
    {
        *("encode", "classify", "sleep", "wake_up", "start_profile"),
        *("stop_profile", "collective_rpc", "apply_model", "from_engine_args", "reward"),
    }
)


def engine_options_of(seed: int, given: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions of `LLM`'s keywords; NotImplementedError or TypeError for those that are none."""
    known = {field.name for field in fields(EngineOptions)}
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ABSENT:
            if value != _ABSENT[name]:
                raise NotImplementedError(f"qinfer does not have LLM({name}={value!r})")
        elif name in known:
            chosen[name] = _settled(name, value)
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(f"LLM got an unexpected keyword argument {name!r}")
    return EngineOptions(seed=seed, **chosen)


def _settled(name: str, value: Any) -> Any:
    """The option's value: "auto" lengths are open, and bytes may be written as '24GiB'."""
    if name == "max_model_len" and value in (-1, "auto"):
        return None
    if name in ("memory", "kv_cache_memory_bytes") and isinstance(value, str):
        return parse_size(value)
    return value


def refuse(**absent: Any) -> None:
    """NotImplementedError naming the first argument that is not None."""
    for name, value in absent.items():
        if value is not None:
            raise NotImplementedError(f"qinfer does not have {name}")


def served_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """The model's names in the API; UserError for none, or an empty one."""
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or not all(isinstance(name, str) and name.strip() for name in found):
        raise UserError(
            f"served_model_name must be a name or several, not {names!r:.100}", "served_model_name"
        )
    return found
