"""Which linear has which scheme, and the dialects of quantization_config (cases Q09, Q10, Q21)."""

import json
from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationConfig

from qinfer.checkpoint.compressed_tensors import (
    Quantization,
    SchemeGroup,
    quantization_config,
    read_quantization,
)
from qinfer.checkpoint.declaration import find_quantization_config
from qinfer.checkpoint.names import all_modules
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.quant import W4A16, Dense, Scheme, W8A8Fp8, W8A8Int8, W8A16Int8
from qinfer.testing import tiny_config

SCHEMES = [W8A8Int8(), W8A16Int8(), W8A8Fp8(), W4A16(64, True), W4A16(64, False), W4A16(128, False)]
MODULES = all_modules(ModelConfig.from_dict(tiny_config("llama")))


def dense(ignore: list[str]) -> set[str]:
    """Short names of the linears that stay dense, "0.q_proj"."""
    quantization = Quantization((SchemeGroup("g", ("Linear",), W8A8Int8()),), tuple(ignore))
    left = [m for m in (*MODULES, "lm_head") if quantization.scheme(m) == Dense()]
    return {m if m == "lm_head" else f"{m.split('.')[2]}.{m.split('.')[-1]}" for m in left}


LAYER_0 = {f"0.{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        ([], set()),
        (["lm_head"], {"lm_head"}),
        (["mlp.gate"], set()),
        (["gate_proj"], {"0.gate_proj", "1.gate_proj"}),
        (["mlp.gate_proj"], {"0.gate_proj", "1.gate_proj"}),
        (["down_proj"], {"0.down_proj", "1.down_proj"}),
        (["re:.*layers\\.0\\..*"], LAYER_0),
        (["layers.0"], LAYER_0),
        (["model.layers.0.self_attn.q_proj"], {"0.q_proj"}),
        (["language_model.model.layers.0.self_attn.q_proj"], {"0.q_proj"}),
        (["re:model.layers.1.mlp"], {"1.gate_proj", "1.up_proj", "1.down_proj"}),
        (["re:layers"], set()),
        (["typo_proj"], set()),
        (["proj"], set()),
        (["Linear"], LAYER_0 | {name.replace("0.", "1.") for name in LAYER_0} | {"lm_head"}),
    ],
)
def test_q09_ignore_matches_whole_segments(ignore: list[str], expected: set[str]) -> None:
    assert dense(ignore) == expected


def test_q09_names_with_a_wrapper_match_without_and_with() -> None:
    group = SchemeGroup("g", ("Linear",), W8A8Int8())
    wrapped = "language_model.model.layers.0.mlp.down_proj"
    for entry in (wrapped, "model.layers.0.mlp.down_proj", "re:model\\.layers\\.0\\.", f"re:{wrapped}"):
        assert Quantization((group,), (entry,)).scheme(wrapped) == Dense()


def test_q09_entries_without_a_match_are_known() -> None:
    quantization = Quantization((SchemeGroup("g", ("Linear",), W8A8Int8()),), ("typo_proj", "lm_head"))
    assert quantization.unmatched([*MODULES, "lm_head"]) == ["typo_proj"]


@pytest.mark.parametrize("order", [("a", "z"), ("z", "a")])
def test_q10_first_declared_group_wins_whatever_its_spelling(order: tuple[str, str]) -> None:
    int8 = quantization_config(W8A16Int8(), ignore=[])["config_groups"]["group_0"]
    int4 = quantization_config(W4A16(64, True), ignore=[])["config_groups"]["group_0"]
    everything = {**int8, "targets": ["re:.*"]}
    first_layer = {**int4, "targets": ["re:.*layers\\.0\\..*"]}
    raw = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": []}

    def scheme_of_layers(groups: list[dict]) -> list[Scheme]:
        quantization = read_quantization({**raw, "config_groups": dict(zip(order, groups, strict=True))})
        return [quantization.scheme(f"model.layers.{i}.mlp.down_proj") for i in range(2)]

    assert scheme_of_layers([everything, first_layer]) == [W8A16Int8(), W8A16Int8()]
    assert scheme_of_layers([first_layer, everything]) == [W4A16(64, True), W8A16Int8()]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_written_configuration_reads_back_and_is_valid_for_the_published_reader(scheme: Scheme) -> None:
    raw = quantization_config(scheme, ignore=["lm_head"])
    assert read_quantization(json.loads(json.dumps(raw))) == Quantization(
        (SchemeGroup("group_0", ("Linear",), scheme),), ("lm_head",)
    )
    published = QuantizationConfig.model_validate(raw)
    assert published.quantization_status.value == raw["quantization_status"] == "compressed"
    assert published.format == raw["format"]
    assert published.ignore == ["lm_head"]
    # the one scheme that transformers cannot load packed, and no other, which would lose its activations
    assert raw.get("dequantize", False) == (scheme.name == "w4a16" and not scheme.symmetric)


def test_mixed_formats_are_read_group_by_group() -> None:
    int4 = quantization_config(W4A16(64, True), ignore=[])["config_groups"]["group_0"]
    fp8 = quantization_config(W8A8Fp8(), ignore=[])["config_groups"]["group_0"]
    raw = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "mlp": {**int4, "format": "pack-quantized", "targets": ["re:.*mlp"]},
            "attention": {**fp8, "format": "float-quantized", "targets": ["re:.*self_attn"]},
        },
    }
    quantization = read_quantization(raw)
    assert quantization.scheme("model.layers.0.mlp.up_proj") == W4A16(64, True)
    assert quantization.scheme("model.layers.0.self_attn.o_proj") == W8A8Fp8()


OURS = quantization_config(W4A16(64, False), ignore=["lm_head"])


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"quantization_config": OURS}, {}),
        ({"quantization_config": {k: v for k, v in OURS.items() if k != "quant_method"}}, {}),
        ({"text_config": {"quantization_config": OURS}}, {}),
        ({"compression_config": OURS}, {}),
        ({}, {"quantization_config.json": OURS}),
        ({"quantization_config": OURS}, {"quantization_config.json": OURS}),
        ({"quantization_config": {**OURS, "quantization_status": "frozen", "unknown": 1}}, {}),
    ],
    ids=["top", "no method", "text_config", "compression_config", "own file", "two that agree", "more keys"],
)
def test_q21_layouts_mean_the_same(config: dict, files: dict, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    quantization = read_quantization(find_quantization_config(tmp_path, config))
    assert quantization.scheme("model.layers.0.mlp.up_proj") == W4A16(64, False)
    assert quantization.ignore == ("lm_head",)


def test_q21_old_spellings() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": "4", "type": "int", "symmetric": False}}
    raw = {"config_groups": {"g": group}, "format": "pack-quantized", "quant_method": "compressed_tensors"}
    group["weights"] |= {"strategy": "group", "group_size": "64", "observer": "minmax"}
    assert read_quantization(raw).scheme("x.q_proj") == W4A16(64, False)
    group["weights"] = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": -1}
    assert read_quantization(raw).scheme("x.q_proj") == W8A16Int8()
    preset = {"config_groups": {"W8A8": ["Linear"]}, "format": "int-quantized"}
    assert read_quantization(preset).scheme("x.q_proj") == W8A8Int8()


def test_q21_two_places_that_disagree(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config of config.json and hf_quant_config.json"):
        find_quantization_config(tmp_path, {"quantization_config": OURS})


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"quant_method": "xyz"}, "method 'xyz' is not supported; supported: compressed-tensors"),
        (
            {"quant_method": "gptq", "bits": "4"},
            "method 'gptq' is not supported; supported: compressed-tensors",
        ),
        ({"bits": 4, "group_size": 128}, "method 'None' is not supported"),
        ({"producer": {"name": "modelopt"}, "quantization": {}}, "method 'modelopt' is not supported"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        ({**OURS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "has a sparsity_config"),
        ({**OURS, "transform_config": {"config_groups": {"R1": {}}}}, "has a transform_config"),
        ({**OURS, "config_groups": {"W8A8_MXFP": ["Linear"]}}, "preset 'W8A8_MXFP' is not supported"),
        ({**OURS, "format": "marlin-24"}, "'marlin-24'.* not supported; supported are int-quantized"),
    ],
)
def test_q21_what_cannot_be_read_is_refused_by_name(raw: dict, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_quantization(raw)


@pytest.mark.parametrize(
    ("name", "method"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")],
)
def test_q21_another_tools_file_names_its_tool(name: str, method: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": True}))
    found = find_quantization_config(tmp_path, {})
    assert found is not None
    assert found["quant_method"] == method
    with pytest.raises(UnsupportedModelError, match=f"'{method}'.* supported: compressed-tensors"):
        read_quantization(found)  # which reads compressed-tensors alone: see dialects.py


def test_q21_two_descriptions_in_one_dialect_must_agree_in_what_decides(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "meta": {"quantizer": "x"}}
    own = {"bits": "4", "group_size": 128, "desc_act": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))
    assert find_quantization_config(tmp_path, {"quantization_config": config}) == config
    (tmp_path / "quantize_config.json").write_text(json.dumps({**own, "group_size": 64}))
    with pytest.raises(CheckpointError, match=r"quantize_config.json disagree"):
        find_quantization_config(tmp_path, {"quantization_config": config})
