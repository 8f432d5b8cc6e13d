"""What a server tells of the model it serves: formats of all layers, not only of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qinfer import LLM
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import layer_modules, layer_prefix, unquantized
from qinfer.config import ModelConfig
from qinfer.model_card import model_facts
from qinfer.quant import W4A16, Dense, Scheme, W8A16Int8
from qinfer.testing import tiny_config

FORMATS = ("quantization", "weight_bits", "group_size")


def served(folder: Path, layer: int, other: Scheme) -> LLM:
    """Three layers of 4 bits but for one of another format."""
    raw = tiny_config("llama", num_hidden_layers=3, dtype="bfloat16")
    config = ModelConfig.from_dict(raw)
    exceptions = {layer_prefix(config, layer) + module: other for module in layer_modules(config)}
    raw["quantization_config"] = quantization_config(
        W4A16(32, False), ignore=unquantized(config), exceptions=exceptions
    )
    (folder / "config.json").write_text(json.dumps(raw))
    return LLM(folder, load_format="dummy", allow_ungated=True, num_kv_blocks=16)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    ("other", "facts", "label"),
    [
        (W8A16Int8(), ("w4a16+w8a16-int8", "4+8", "32"), "w4a16 g32 asym + w8a16-int8"),
        (Dense(), ("w4a16+dense", "4+16", "32"), "w4a16 g32 asym + dense"),
    ],
)
def test_formats_of_all_layers_are_told(
    tmp_path: Path, layer: int, other: Scheme, facts: tuple[str, ...], label: str
) -> None:
    llm = served(tmp_path, layer, other)
    assert tuple(model_facts(llm)[name] for name in FORMATS) == facts
    assert llm.engine.ledger.label == label
