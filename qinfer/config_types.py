"""What kind of value each field of config.json must hold, looked at before any is used.

A file that was edited by hand or damaged says "8" for 8, null for a number, a list for a name. Taken as they
come such values fail far from here, in words that name neither field nor file, or do not fail at all. So
every field that qinfer reads stands in one table with its kind. Null is no value: it is refused where a
number is needed, and means "none" elsewhere. Counts that every model has are checked where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qinfer.errors import CheckpointError

MAX_COUNT = 2**31 - 1  # of anything that is counted: what is more was never meant


class _Kind(NamedTuple):
    words: str  # after "it must be"
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _are(value: object, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_NAMES = _Kind("a list of names", lambda value: _are(value, lambda name: isinstance(name, str)))
_NUMBERS = _Kind("a list of numbers", lambda value: _are(value, _is_number))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool) or value in (0, 1))
_FLAGS = _Kind("a list of 0 and 1", lambda value: _are(value, _FLAG.holds))
_COUNT = _Kind("a whole number", _is_count)
_POSITIVE_COUNT = _Kind("a positive whole number", lambda value: _is_count(value) and value > 0)
_NUMBER = _Kind("a number", _is_number)
_POSITIVE = _Kind("a positive number", lambda value: _is_number(value) and value > 0)
_NOT_NEGATIVE = _Kind("a number that is not negative", lambda value: _is_number(value) and value >= 0)
_ID = _Kind("a token id", lambda value: type(value) is int)
_IDS = _Kind("a token id or a list of them", lambda value: _ID.holds(value) or _are(value, _ID.holds))
_SHARE = _Kind("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)

_OUTER: Mapping[str, _Kind] = {"architectures": _NAMES, "text_config": _OBJECT}
_FIELDS: Mapping[str, _Kind] = {
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"), _FLAG
    ),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval", "sliding_window"), _POSITIVE_COUNT),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"), _POSITIVE),
    **dict.fromkeys(("query_pre_attn_scalar", "rope_theta", "rope_local_base_freq"), _POSITIVE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _NUMBER),
    "rms_norm_eps": _NOT_NEGATIVE,
    "max_window_layers": _COUNT,
    "original_max_position_embeddings": _POSITIVE_COUNT,
    "partial_rotary_factor": _SHARE,
    "layer_types": _NAMES,
    "no_rope_layers": _FLAGS,
    "bos_token_id": _ID,
    "eos_token_id": _IDS,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
}
_NEEDED = (
    *("rms_norm_eps", "logits_scaling", "embedding_multiplier", "residual_multiplier"),
    "attention_multiplier",
)
_ROPE_PARTS = ("full_attention", "sliding_attention")
_ROPE: Mapping[str, _Kind] = {
    **dict.fromkeys(_ROPE_PARTS, _OBJECT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), _NUMBER),
    **dict.fromkeys(("short_factor", "long_factor"), _NUMBERS),
    **dict.fromkeys(("rope_type", "type"), _Kind("a name", lambda value: isinstance(value, str))),
    "original_max_position_embeddings": _POSITIVE_COUNT,
    "max_position_embeddings": _POSITIVE_COUNT,
    "partial_rotary_factor": _SHARE,
    "truncate": _FLAG,
}


def check_outer(raw: Mapping[str, Any]) -> None:
    """CheckpointError for the first field that says which model it is, or of which part, in another kind."""
    _check(raw, _OUTER, "config.json: ")


def check_fields(raw: Mapping[str, Any]) -> None:
    """CheckpointError naming the first field of a model's own part that is not what it must be."""
    _check(raw, _FIELDS, "config.json: ")
    for name in _NEEDED:
        if name in raw and raw[name] is None:
            raise CheckpointError(f"config.json: {name} is null; it must be {_FIELDS[name].words}")
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name) or {}
        for inner, where in ((rope, ""), *((rope.get(part) or {}, f"{part}.") for part in _ROPE_PARTS)):
            _check(inner, _ROPE, f"config.json: {name}.{where}")


def _check(raw: Mapping[str, Any], kinds: Mapping[str, _Kind], where: str) -> None:
    for name, kind in kinds.items():
        value = raw.get(name)
        if value is not None and not kind.holds(value):
            raise CheckpointError(f"{where}{name} is {value!r:.100}; it must be {kind.words}")
