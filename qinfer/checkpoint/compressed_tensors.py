"""`quantization_config` of compressed-tensors: which scheme each linear has, read and written.

The dictionary declares groups, each with targets and number formats, and a list of what to leave alone.
A target or an entry of `ignore` is one of

* `Linear`, the class: every linear layer;
* `re:...`: a regular expression that matches the name from its beginning;
* a name, by whole dotted segments: `mlp.gate` is no part of `mlp.gate_proj`, `down_proj` is every down_proj,
  `model.layers.0.self_attn.q_proj` is one linear. Prefixes of wrappers (`language_model.`) do not count.

`ignore` wins over every group; of several groups that match, the first declared wins, whatever its spelling.

Old spellings are read as well: the key `compression_config`, the dictionary inside `text_config`, named
presets, numbers as strings. What cannot be read is refused by name, never taken for an unquantized model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qinfer.checkpoint.declaration import METHOD, mapping_of, method_of
from qinfer.checkpoint.stored import Stored
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.quant import FORMAT, W4A16, Dense, Scheme, W8A8Fp8, W8A8Int8, W8A16Int8, scheme_from_group

SUPPORTED = f"{METHOD} (int8, fp8 and int4 as qinfer writes them)"
# the version whose reader the configurations are written for; informational
_VERSION = "0.17.0"
_WRAPPERS = frozenset({"model", "language_model", "text_model"})
# preset names that compressed-tensors accepts in place of a scheme, where a scheme of ours is meant
_PRESETS: dict[str, Scheme] = {
    "W8A8": W8A8Int8(),
    "INT8": W8A8Int8(),
    "W8A16": W8A16Int8(),
    "W4A16": W4A16(128, True),
    "W4A16_ASYM": W4A16(128, False),
    "FP8_DYNAMIC": W8A8Fp8(),
}


class SchemeGroup(NamedTuple):
    """One entry of config_groups."""

    name: str
    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True)
class Quantization:
    """Which scheme each linear has; a model with neither groups nor stored linears is not quantized.

    `stored` are the linears of a checkpoint in another tool's dialect, `method`, by full name.
    """

    groups: tuple[SchemeGroup, ...] = ()
    ignore: tuple[str, ...] = ()
    kv_cache_scheme: dict[str, Any] | None = None
    method: str = METHOD
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.groups or self.stored)

    def scheme(self, module: str) -> Scheme:
        """Scheme of a linear by its full name; Dense() when it is ignored or no group targets it."""
        if module in self.stored:
            return self.stored[module].scheme
        if not any(matches(entry, module) for entry in self.ignore):
            for group in self.groups:
                if any(matches(target, module) for target in group.targets):
                    return group.scheme
        return Dense()

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Entries of `ignore` and targets that match none of these linears."""
        known = list(modules)
        entries = [*self.ignore, *(target for group in self.groups for target in group.targets)]
        return [entry for entry in entries if not any(matches(entry, module) for module in known)]


def matches(entry: str, module: str) -> bool:
    """Whether a target or an entry of `ignore` names this linear."""
    if entry == "Linear":
        return True
    path = _without_wrappers(module)
    if entry.startswith("re:"):
        pattern = entry.removeprefix("re:")
        return any(re.match(pattern, name) for name in (module, ".".join(("model", *path))))
    wanted = _without_wrappers(entry)
    return any(path[i : i + len(wanted)] == wanted for i in range(len(path) - len(wanted) + 1))


def _without_wrappers(name: str) -> list[str]:
    segments = name.split(".")
    while len(segments) > 1 and segments[0] in _WRAPPERS:
        segments = segments[1:]
    return segments


def quantization_config(
    scheme: Scheme,
    *,
    ignore: Sequence[str],
    exceptions: Mapping[str, Scheme] | None = None,
    kv_cache_scheme: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The dictionary for a model whose linears all have `scheme`, but for those that `ignore` lists.

    `exceptions` have another, by full name: they are declared first, by name, because a reader takes the
    first group that matches, or a name before a class; those that are dense join `ignore`.

    Keys and values are those that readers from compressed-tensors 0.15 and vLLM on accept. `dequantize` is
    for transformers alone: with it asymmetric int4, whose packed zero points it does not load otherwise,
    is unpacked at load; it would unpack every group of a mixed model as the first, so there it is left out.
    """
    targets: dict[Scheme, list[str]] = {}
    for module, other in (exceptions or {}).items():
        targets.setdefault(other, []).append(module)
    dense = targets.pop(Dense(), [])
    targets[scheme] = ["Linear"]
    groups = {f"group_{i}": _declared(*item) for i, item in enumerate(targets.items())}
    mixed = len(groups) > 1
    if mixed:
        for group, declared in zip(groups.values(), targets, strict=True):
            group["format"] = FORMAT[declared.name]
    config: dict[str, Any] = {
        "quant_method": METHOD,
        "format": "mixed-precision" if mixed else FORMAT[scheme.name],
        "quantization_status": "compressed",  # with another word packed weights load as noise
        "config_groups": groups,
        "ignore": [*ignore, *dense],
        "kv_cache_scheme": kv_cache_scheme,
        "global_compression_ratio": None,
        "version": _VERSION,
    }
    weights = groups["group_0"]["weights"]
    if not mixed and weights["num_bits"] == 4 and not weights["symmetric"]:
        config["dequantize"] = True
    return config


def _declared(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """One entry of config_groups."""
    group = scheme.group()
    assert group is not None, "a dense model has no quantization_config"
    return {"targets": targets, **group, "output_activations": None}


def read_quantization(raw: Mapping[str, Any] | None) -> Quantization:
    """Reads a quantization_config; None means not quantized.

    Raises UnsupportedModelError naming the method or format and those that are supported.
    """
    if raw is None:
        return Quantization()
    _refuse_unsupported(mapping_of(raw, "quantization_config"))
    groups = tuple(
        _group(name, group, str(raw.get("format"))) for name, group in raw["config_groups"].items()
    )
    ignore = _list(raw.get("ignore") or [], "ignore")
    for entry in (*ignore, *(target for group in groups for target in group.targets)):
        _check_pattern(entry)
    return Quantization(groups, ignore, raw.get("kv_cache_scheme"))


def _check_pattern(entry: object) -> None:
    if not isinstance(entry, str):
        raise CheckpointError(f"quantization_config names a module by {entry!r}; it must be text")
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error as error:
        raise CheckpointError(f"quantization_config: {entry!r} is no regular expression: {error}") from None


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if method_of(raw) != METHOD:
        method = raw.get("quant_method") or method_of(raw)
        raise UnsupportedModelError(
            f"quantization method {method!r} is not supported; supported: {SUPPORTED}"
        )
    if not isinstance(raw.get("config_groups"), Mapping) or not raw["config_groups"]:
        raise UnsupportedModelError(f"quantization_config has no config_groups; supported: {SUPPORTED}")
    for key in ("sparsity_config", "transform_config"):
        section = mapping_of(raw.get(key) or {}, key)
        if section and section.get("format") != "dense":
            raise UnsupportedModelError(
                f"quantization_config has a {key} ({section}), which is not supported"
            )


def _group(name: str, raw: Any, top_format: str) -> SchemeGroup:
    if isinstance(raw, list):  # {"W8A8": ["Linear"]}
        if name not in _PRESETS:
            raise UnsupportedModelError(
                f"quantization preset {name!r} is not supported; supported: {', '.join(_PRESETS)}"
            )
        return SchemeGroup(name, tuple(raw), _PRESETS[name])
    raw = mapping_of(raw, name)
    arguments = {
        key: _numbers(mapping_of(raw[key], key))
        for key in ("weights", "input_activations", "output_activations")
        if raw.get(key) is not None
    }
    scheme = scheme_from_group(arguments, raw.get("format") or top_format)
    return SchemeGroup(name, _list(raw.get("targets") or [], f"targets of {name}"), scheme)


def _numbers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Some tools write "num_bits": "4"."""
    return {
        key: int(value) if key in ("num_bits", "group_size") and str(value).isdecimal() else value
        for key, value in arguments.items()
    }


def _list(value: Any, name: str) -> tuple[Any, ...]:
    """`value` as a tuple, or CheckpointError."""
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"quantization_config: {name} is {value!r:.100}; it must be a list")
    return tuple(value)
