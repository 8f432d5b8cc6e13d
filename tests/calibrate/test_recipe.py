"""Recipes are settled, and refused, before any weight is read."""

import pytest

from qinfer.calibrate.recipe import settle
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.quant import W4A16, W8A8Fp8, W8A8Int8, W8A16Int8
from qinfer.testing import tiny_config

CONFIG = ModelConfig.from_dict(
    tiny_config(
        "smollm2", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3
    )
)


@pytest.mark.parametrize(
    ("name", "scheme", "method"),
    [
        ("int8", W8A8Int8(), "smoothquant"),
        ("fp8", W8A8Fp8(), "rtn"),
        ("awq", W4A16(64, False), "awq"),
        ("w8a8-int8", W8A8Int8(), "smoothquant"),
        ("w8a16-int8", W8A16Int8(), "rtn"),
        ("w4a16", W4A16(64, False), "awq"),
    ],
)
def test_presets_and_names(name, scheme, method):
    recipe = settle(CONFIG, name)
    assert (recipe.scheme, recipe.method) == (scheme, method)
    assert recipe.needs_text == (method != "rtn")


def test_q07_group_size_is_lowered_for_the_whole_model_and_said():
    recipe = settle(CONFIG, "awq", group_size=128)
    assert recipe.scheme == W4A16(64, False)
    (note,) = recipe.notes
    assert "128" in note
    assert "using 64 for the whole model" in note
    assert "self_attn.q_proj (576)" in note
    assert "down_proj" not in note  # 1536 is divided by 128


def test_group_size_that_divides_is_kept_without_a_note():
    wide = ModelConfig.from_dict(tiny_config("llama", hidden_size=128, intermediate_size=256))
    assert settle(wide, "awq") == (W4A16(128, False), "awq", (), "output")
    assert settle(CONFIG, "awq", group_size=32, symmetric=True) == (W4A16(32, True), "awq", (), "output")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"scheme": "int4"}, ["'int4'", "int8, fp8, awq", "w4a16"]),
        ({"scheme": "dense"}, ["'dense' quantizes nothing"]),
        ({"scheme": "awq", "method": "gptqq"}, ["'gptqq'", "rtn, smoothquant, awq"]),
        ({"scheme": "w4a16", "method": "smoothquant"}, ["w4a16", "use awq, gptq or rtn"]),
        ({"scheme": "int8", "method": "awq"}, ["w8a8-int8", "use smoothquant, gptq or rtn"]),
        ({"scheme": "int8", "group_size": 64}, ["group_size", "w8a8-int8"]),
        ({"scheme": "awq", "group_size": 48}, ["48", "128, 64 or 32"]),
    ],
)
def test_refusals_name_the_value_and_the_way_out(arguments, parts):
    with pytest.raises(UserError) as caught:
        settle(CONFIG, **arguments)
    for part in parts:
        assert part in str(caught.value)


def test_q07_widths_that_nothing_divides_are_listed():
    odd = ModelConfig.from_dict(tiny_config("llama", hidden_size=48, intermediate_size=128))
    with pytest.raises(UserError, match=r"self_attn.q_proj \(48\)"):
        settle(odd, "awq")
