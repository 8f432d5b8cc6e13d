"""Where a model says how its weights are quantized, and in whose dialect.

Several places may say it: config.json, its text_config, files beside it. Those that do must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qinfer.checkpoint.files import read_json
from qinfer.errors import CheckpointError

METHOD = "compressed-tensors"
# files that say how weights are stored, and whose they are where they do not say that themselves
_SEPARATE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quantization_config.json": METHOD,
}
# what two descriptions of the same weights must agree on, where both say it
_DECIDING = ("bits", "group_size", "sym", "zero_point", "desc_act", "checkpoint_format", "quant_algo")


def find_quantization_config(folder: Path, raw_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's quantization_config, wherever it stands; None for an unquantized model.

    Raises CheckpointError when two places disagree.
    """
    inner = raw_config.get("text_config") or {}
    found: dict[str, dict[str, Any]] = {}
    for where, holder in (("config.json", raw_config), ("config.json's text_config", inner)):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                found[f"{key} of {where}"] = mapping_of(holder[key], key)
    for name, method in _SEPARATE_FILES.items():
        if (folder / name).is_file():
            found[name] = {"quant_method": method, **read_json(folder / name)}
    first = next(iter(found), None)
    if first is None:
        return None
    for where, config in found.items():
        if not _agree(found[first], config):
            raise CheckpointError(
                f"{folder}: {first} and {where} disagree on how weights are quantized; remove the wrong one"
            )
    return found[first]


def method_of(raw: Mapping[str, Any]) -> str:
    """The tool whose dialect a quantization_config is written in, with "-" for "_" in our own's name."""
    method = raw.get("quant_method")
    if method is None and raw.get("config_groups"):
        return METHOD
    if method is None and mapping_of(raw.get("producer") or {}, "producer").get("name") == "modelopt":
        return "modelopt"
    return METHOD if str(method).replace("_", "-") == METHOD else str(method)


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions may be of the same weights; ours must be equal, others in what decides."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or method_of(one) != method_of(other):
        return one == other
    if method_of(one) == METHOD:
        return {**one, "quant_method": METHOD} == {**other, "quant_method": METHOD}
    one, other = (config.get("quantization") or config for config in (one, other))
    return all(str(one[key]) == str(other[key]) for key in _DECIDING if key in one and key in other)


def mapping_of(value: Any, name: str) -> dict[str, Any]:
    """`value`, or CheckpointError."""
    if not isinstance(value, dict):
        raise CheckpointError(f"quantization_config: {name} is {value!r:.100}; it must be an object")
    return value
