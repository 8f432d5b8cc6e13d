"""Schemes by name and by what a checkpoint says; everything else is refused in one line."""

import pytest

from qinfer.errors import UnsupportedModelError, UserError
from qinfer.quant import (
    FORMAT,
    SCHEMES,
    W4A16,
    W8A8Fp8,
    W8A8Fp8Block,
    W8A8Fp8Static,
    W8A8Int8,
    W8A16Fp8,
    W8A16Int8,
    scheme_by_name,
    scheme_from_group,
)

EIGHT_BIT = [W8A8Int8(), W8A16Int8(), W8A8Fp8(), W8A8Fp8Static(), W8A8Fp8Block(), W8A16Fp8()]
QUANTIZED = EIGHT_BIT + [W4A16(g, s) for g in (32, 64, 128) for s in (True, False)]
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("scheme", QUANTIZED, ids=lambda scheme: scheme.label)
def test_a_scheme_reads_what_it_writes(scheme):
    assert scheme_from_group(scheme.group(), FORMAT[scheme.name]) == scheme


def test_names_and_formats_cover_the_same_schemes():
    assert SCHEMES.keys() == FORMAT.keys()
    for name, scheme in SCHEMES.items():
        assert scheme_by_name(name) == scheme()
        assert scheme.name == name
    assert scheme_by_name("w4a16", group_size=32, symmetric=True) == W4A16(32, True)
    assert scheme_by_name("w4a16").label == "w4a16 g128 asym"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int3", {}, "w8a8-int8, w8a16-int8, w8a8-fp8, .*, w4a16"),
        ("w4a16", {"group_size": 100}, "128, 64 or 32"),
        ("w8a8-int8", {"group_size": 64}, "no group_size"),
        ("w8a8-fp8", {"symmetric": False}, "no symmetric"),
    ],
)
def test_wrong_choices_are_one_clear_line(name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        scheme_by_name(name, **options)
    assert "\n" not in str(caught.value)


def test_defaults_and_old_spellings_of_arguments():
    minimal = {"weights": {"num_bits": 4, "group_size": 128}, "input_activations": None}
    assert scheme_from_group(minimal, "pack-quantized") == W4A16(128, True)
    old_channel = {"weights": {"num_bits": 8, "group_size": -1}}
    assert scheme_from_group(old_channel, "pack-quantized") == W8A16Int8()
    observed = {"weights": CHANNEL | {"observer": "minmax", "actorder": None}, "input_activations": TOKEN}
    assert scheme_from_group(observed, "int-quantized") == W8A8Int8()
    block = W8A8Fp8Block().group()
    block["weights"]["block_structure"] = "128x128"
    assert scheme_from_group(block, "float-quantized") == W8A8Fp8Block()
    static_order = {"weights": {"num_bits": 4, "group_size": 64, "actorder": "weight"}}
    assert scheme_from_group(static_order, "pack-quantized") == W4A16(64, True)


@pytest.mark.parametrize(
    ("group", "fmt"),
    [
        ({"weights": CHANNEL | {"num_bits": 3}}, "pack-quantized"),
        ({"weights": CHANNEL | {"strategy": "tensor"}, "input_activations": TOKEN}, "int-quantized"),
        ({"weights": CHANNEL, "input_activations": TOKEN | {"symmetric": False}}, "int-quantized"),
        ({"weights": CHANNEL, "input_activations": TOKEN | {"dynamic": False}}, "int-quantized"),
        ({"weights": CHANNEL, "input_activations": TOKEN}, "pack-quantized"),
        ({"weights": CHANNEL}, "int-quantized"),
        ({"weights": CHANNEL, "input_activations": TOKEN, "output_activations": TOKEN}, "int-quantized"),
        ({"weights": {"num_bits": 4, "group_size": 256}}, "pack-quantized"),
        ({"weights": None, "input_activations": TOKEN}, "int-quantized"),
    ],
)
def test_other_formats_are_refused_naming_the_supported(group, fmt):
    with pytest.raises(UnsupportedModelError, match="supported are int-quantized") as caught:
        scheme_from_group(group, fmt)
    assert fmt in str(caught.value)
