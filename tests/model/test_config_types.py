"""Whatever a field of config.json holds, it is read or refused in one line that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from qinfer.checkpoint.compressed_tensors import (
    quantization_config,
    read_quantization,
)
from qinfer.checkpoint.declaration import find_quantization_config
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError
from qinfer.quant import W4A16, W8A8Int8
from qinfer.testing import FAMILIES, tiny_config

ODD = (
    *(None, "abc", "", "8", -1, 0, 1.5, True, 10**30, math.inf, math.nan),
    *([], ["a"], [None], [1, 2], {}, {"a": 1}),
)
# fields that published files have besides those of a tiny model's
MORE = {
    **{"head_dim": 16, "rope_theta": 10_000.0, "rope_scaling": None, "sliding_window": None},
    **{"attention_bias": False, "layer_types": None, "bos_token_id": 1, "text_config": None},
}


def places(raw: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands, however deep."""
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(raw: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy = deepcopy(raw)
    holder: Any = copy
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return copy


def refusals(raw: dict[str, Any], read: Callable[[dict[str, Any]], object]) -> Iterator[str]:
    """What is said of each odd value in each place that is refused; any other error is the test's."""
    for path in places(raw):
        for value in ODD:
            try:
                read(changed(raw, path, value))
            except CheckpointError as error:
                yield str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_odd_value_in_every_field_is_read_or_refused_in_one_line(family: str) -> None:
    raw = {**MORE, **tiny_config(family)}
    lines = list(refusals(raw, ModelConfig.from_dict))
    assert len(lines) > 100
    assert max(map(len, lines)) < 500
    assert "\n" not in "".join(lines)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'; it must be a number that is not negative"),
        ("rms_norm_eps", None, "rms_norm_eps is null; it must be a number"),
        (
            "num_hidden_layers",
            10**30,
            "num_hidden_layers is 1000000000000000000000000000000; it must be a pos",
        ),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false'; it must be true or false"),
        (
            "architectures",
            "LlamaForCausalLM",
            "architectures is 'LlamaForCausalLM'; it must be a list of names",
        ),
        ("text_config", [1], r"text_config is \[1\]; it must be an object"),
        ("rope_theta", -1, "rope_theta is -1; it must be a positive number"),
        (
            "rope_scaling",
            {"type": "linear", "factor": "2"},
            r"rope_scaling\.factor is '2'; it must be a positive",
        ),
        ("eos_token_id", "2", "eos_token_id is '2'; it must be a token id or a list of them"),
        ("bos_token_id", [1], r"bos_token_id is \[1\]; it must be a token id"),
        ("head_dim", 3, "3 dimensions of a head turn; they turn in pairs"),
        (
            "partial_rotary_factor",
            2.0,
            "partial_rotary_factor is 2.0; it must be a number above 0, at most 1",
        ),
    ],
)
def test_what_is_refused_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.from_dict(tiny_config("llama", **{field: value}))


def test_null_means_none_where_that_means_something() -> None:
    nothing = {"sliding_window": None, "layer_types": None, "rope_scaling": None, "eos_token_id": None}
    config = ModelConfig.from_dict(tiny_config("mistral", text_config=None, head_dim=None, **nothing))
    assert set(config.windows) == {None}
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("scheme", [W8A8Int8(), W4A16(32, False)])
def test_every_odd_value_in_a_quantization_config_is_read_or_refused(scheme, tmp_path) -> None:
    raw = {"quantization_config": json.loads(json.dumps(quantization_config(scheme, ignore=["lm_head"])))}
    lines = list(refusals(raw, lambda one: read_quantization(find_quantization_config(tmp_path, one))))
    assert len(lines) > 100
    assert "\n" not in "".join(lines)
