"""The rotary embedding's settings, read from either spelling of config.json.

transformers 4 wrote `rope_theta`, `rope_scaling` and, for Gemma 3, `rope_local_base_freq`; transformers 5
writes `rope_parameters`, flat or per type of layer. Both become `RopeConfig`, with what the formulas need
checked and the two context lengths settled; `qinfer.model.rotary` computes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from qinfer.config_types import MAX_COUNT
from qinfer.errors import CheckpointError, UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer (Su et al. 2021) with its context scaling."""

    theta: float
    kind: RopeKind = "default"
    rotary_dim: int = 0  # leading dimensions of a head that turn
    # the numbers of `rope_scaling` / `rope_parameters`, as in config.json ("factor", "low_freq_factor", ...),
    # with "max_position_embeddings" and "original_max_position_embeddings" settled
    scaling: tuple[tuple[str, Any], ...] = ()


_OWN_FIELDS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def positive_int(raw: Mapping[str, Any], key: str) -> int:
    """raw[key]; CheckpointError when it is missing or no positive whole number."""
    value = raw.get(key)
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a positive whole number")
    return value


def read_ropes(raw: Mapping[str, Any], head_dim: int, *, phi: bool) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of all layers, and of those with a window where it is another.

    `raw` is config.json with the defaults filled in, `default_theta` among them; `phi` reads early names as
    Phi-3's own files mean them. Raises UnsupportedModelError and CheckpointError.
    """
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta") or raw["default_theta"]
    local_theta = raw.get("rope_local_base_freq") or raw["default_local_theta"]
    nested = "full_attention" in parameters or "sliding_attention" in parameters
    local: Mapping[str, Any] = {}
    if nested:
        parameters, local = (parameters.get(k) or {} for k in ("full_attention", "sliding_attention"))
    rope = _rope(parameters, theta, raw, head_dim, phi=phi)
    if local_theta is None and not local:
        return rope, None
    return rope, _rope(local, local_theta or theta, raw, head_dim, phi=phi)


def _rope(
    parameters: Mapping[str, Any], theta: float, raw: Mapping[str, Any], head_dim: int, *, phi: bool
) -> RopeConfig:
    """`theta` holds where `parameters` have none of their own."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "su" or (phi and kind == "yarn"):  # early names of longrope in Phi-3's own files
        kind = "longrope"
    if kind not in _NEEDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; qinfer knows {', '.join(_NEEDS)}"
        )
    fraction = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(f"config.json: {rotary_dim} dimensions of a head turn; they turn in pairs")
    scaling = {k: v for k, v in parameters.items() if v is not None and k not in _OWN_FIELDS}
    missing = [key for key in _NEEDS[kind] if key not in scaling]
    if missing:
        raise CheckpointError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}")
    for key in ("short_factor", "long_factor"):
        if key in scaling:
            scaling[key] = tuple(scaling[key])
            if len(scaling[key]) != rotary_dim // 2:
                raise CheckpointError(
                    f"config.json: rope scaling's {key} has length {len(scaling[key])}, not {rotary_dim // 2}"
                )
    if kind != "default":
        longest = positive_int(raw, "max_position_embeddings")
        scaling["max_position_embeddings"] = longest
        original = raw.get("original_max_position_embeddings")  # Phi-3 keeps it outside, and it rules there
        scaling["original_max_position_embeddings"] = (
            original or scaling.get("original_max_position_embeddings") or longest
        )
    theta = float(parameters.get("rope_theta") or theta)
    return RopeConfig(theta, cast(RopeKind, kind), rotary_dim, tuple(sorted(scaling.items())))
