"""Names and shapes from the configuration are those that transformers gives its parameters."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qinfer.checkpoint import names
from qinfer.config import ModelConfig
from qinfer.testing import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_same_names_and_shapes_as_transformers(family: str, changes: dict) -> None:
    raw = tiny_config(family, **changes)
    theirs = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(theirs).named_parameters())
    config = ModelConfig.from_dict(raw)
    ours = dict(names.global_tensors(config))
    for i in range(config.num_layers):
        ours |= names.layer_tensors(config, i)
    assert ours == {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def test_groups_and_full_names() -> None:
    config = ModelConfig.from_dict(tiny_config("qwen2"))
    assert [group.name for group in names.layer_groups(config)] == ["qkv", "o", "gate_up", "down"]
    modules = names.all_modules(config)
    assert len(modules) == 14
    assert modules[0] == "model.layers.0.self_attn.q_proj"
    assert modules[-1] == "model.layers.1.mlp.down_proj"
    fused = ModelConfig.from_dict(tiny_config("phi3"))
    assert names.layer_groups(fused)[0].modules == ("self_attn.qkv_proj",)
    assert names.linear_shape(fused, "mlp.gate_up_proj") == (256, 64)
