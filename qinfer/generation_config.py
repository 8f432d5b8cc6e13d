"""The sampling that a model recommends: its generation_config.json, another's, or none, and what replaces it.

These are defaults: what a request says goes before them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qinfer.checkpoint.files import read_json
from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def default_params(folder: Path, source: str, overrides: Mapping[str, Any]) -> SamplingParams:
    """Defaults of the model in `folder`, over those of SamplingParams.

    `source` is "auto" (the model's own), "vllm" (none) or a folder; `overrides` are fields of the file by
    name. UserError for a field that does not exist or whose value cannot be.
    """
    where = f"generation_config {source}"
    found: dict[str, Any] = {}
    if source != "vllm":
        path = (folder if source == "auto" else Path(source)) / "generation_config.json"
        if source != "auto" and not path.is_file():
            raise UserError(f"there is no {path}: generation_config is auto, vllm or a folder with one")
        where, found = str(path), read_json(path) if path.is_file() else {}
    if unknown := sorted(overrides.keys() - set(FIELDS)):
        raise UserError(
            f"override_generation_config has {unknown[0]!r}; its fields are {', '.join(FIELDS)}",
            "override_generation_config",
        )
    values = {name: value for name in FIELDS if (value := {**found, **overrides}.get(name)) is not None}
    if "max_new_tokens" in values:
        values["max_tokens"] = values.pop("max_new_tokens")
    try:
        return SamplingParams(**values)
    except UserError as error:
        changed = ", as overridden" if overrides else ""
        raise UserError(f"{where}{changed}: {error}", error.parameter) from None


def parse_overrides(text: str | None) -> Mapping[str, Any] | None:
    """Overrides as the command line has them, a JSON object; UserError where the text is none."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f'override_generation_config must be a JSON object like {{"top_k": 20}}, not {text!r:.100}',
            "override_generation_config",
        )
    return value
