"""From command-line words to the keywords of `LLM`, and from an engine back to what a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qinfer.engine.footprint import parse_size

if TYPE_CHECKING:
    from qinfer.llm import LLM


def llm_keywords(memory: str | None, **options: Any) -> dict[str, Any]:
    """Keywords for `LLM`; what was not chosen (None) is left to the engine."""
    chosen = {name: value for name, value in options.items() if value is not None}
    return chosen if memory is None else chosen | {"memory": parse_size(memory)}


def describe_model(llm: LLM) -> dict[str, Any]:
    """What was loaded: the gate's word and the memory ledger, as plain values."""
    return {
        "architecture": llm.config.architecture,
        "max_model_len": llm.engine.ledger.max_model_len,
        "gate": {"state": llm.gate.state, "line": llm.gate.line},
        "ledger": llm.engine.ledger.to_dict(),
    }
