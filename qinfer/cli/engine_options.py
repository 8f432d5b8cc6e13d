"""The options of every command that loads a model into an engine, and what becomes of them: `LLM`'s keywords.

Typer reads options off a command's parameters, of which thirty would stand in each such command. They stand
here once: a command has one parameter `engine` instead, in whose place the decorator shows typer the options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypeAlias

from qinfer.cli import options
from qinfer.engine.footprint import parse_size

if TYPE_CHECKING:
    from qinfer.config import ModelConfig
    from qinfer.engine.memory import Ledger
    from qinfer.evals.certificate import GateStatus

EngineKeywords: TypeAlias = dict[str, Any]
"""Keywords of `LLM`, as `with_engine_options` hands them to a command; what was not chosen is left out."""

MODEL = ("tokenizer", "load_format", "scheme", "group_size", "symmetric")
ENGINE = (
    *("dtype", "kv_cache_dtype", "lm_head_dtype", "memory", "gpu_memory_utilization", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching"),
    *("enable_chunked_prefill", "enforce_eager"),
)
GATE = ("chat_template", "allow_ungated", "trust")
HUB = ("revision", "hf_token")
_OPTIONS: dict[str, tuple[Any, Any]] = {  # name: (how typer reads it, default)
    "tokenizer": (options.TokenizerOption, None),
    "load_format": (options.LoadFormatOption, "auto"),
    "scheme": (options.SchemeOption, None),
    "group_size": (options.GroupSizeOption, None),
    "symmetric": (options.SymmetricOption, None),
    "dtype": (options.DtypeOption, "auto"),
    "kv_cache_dtype": (options.KVCacheDtypeOption, "auto"),
    "lm_head_dtype": (options.LMHeadDtypeOption, "auto"),
    "memory": (options.MemoryOption, None),
    "gpu_memory_utilization": (options.GpuMemoryUtilizationOption, None),
    "max_model_len": (options.MaxModelLenOption, None),
    "max_num_seqs": (options.MaxNumSeqsOption, None),
    "max_num_batched_tokens": (options.MaxNumBatchedTokensOption, None),
    "block_size": (options.BlockSizeOption, None),
    "enable_prefix_caching": (options.PrefixCachingOption, True),
    "enable_chunked_prefill": (options.ChunkedPrefillOption, True),
    "enforce_eager": (options.EnforceEagerOption, False),
    "seed": (options.SeedOption, 0),
    "chat_template": (options.ChatTemplateOption, None),
    "allow_ungated": (options.AllowUngatedOption, False),
    "trust": (options.TrustOption, None),
    "revision": (options.RevisionOption, None),
    "hf_token": (options.HubTokenOption, None),
}


def with_engine_options(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options by name; its parameter `engine` gets their values as EngineKeywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = signature(command, eval_str=True)

        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in names}
            command(**given, engine=_keywords(**chosen))

        shown: list[Parameter] = []
        for parameter in own.parameters.values():
            if parameter.name == "engine":
                shown += [_parameter(name, defaults) for name in names]
            else:
                shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        # typer reads it, as `inspect` does; no type of a function has it
        run.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorate


def _parameter(name: str, defaults: dict[str, Any]) -> Parameter:
    annotation, default = _OPTIONS[name]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=annotation)


def _keywords(memory: str | None = None, **chosen: Any) -> EngineKeywords:
    keywords = {name: value for name, value in chosen.items() if value is not None}
    return keywords if memory is None else keywords | {"memory": parse_size(memory)}


def say_gate(gate: GateStatus) -> None:
    """The gate's word to stderr, unless the log has it already, as a warning."""
    if not gate.is_warning:
        print(gate.line, file=sys.stderr, flush=True)


def describe_model(config: ModelConfig, gate: GateStatus, ledger: Ledger) -> dict[str, Any]:
    """What was loaded: the gate's word and the memory ledger, as plain values."""
    return {
        "architecture": config.architecture,
        "max_model_len": ledger.max_model_len,
        "gate": {"state": gate.state, "line": gate.line},
        "ledger": ledger.to_dict(),
    }
