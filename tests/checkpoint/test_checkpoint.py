"""Opening a checkpoint names everything that is missing or wrong before anything is loaded (case Q19)."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint, required_tensors
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import all_modules
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W4A16, Dense, Scheme, W8A8Fp8, W8A8Int8, W8A16Int8
from qinfer.testing import FAMILIES, tiny_model

SCHEMES = [W8A8Int8(), W8A16Int8(), W8A8Fp8(), W4A16(32, True), W4A16(32, False)]
Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantized(folder: Path, scheme: Scheme, family: str = "llama") -> Path:
    """A tiny model whose linears are quantized to nearest, in place."""
    source = open_checkpoint(tiny_model(family, folder, dtype="bfloat16"))
    tensors = {name: source.tensor(name).clone() for name in source.names()}
    for module in all_modules(source.config):
        made = scheme.quantize(tensors.pop(f"{module}.weight"), dtype=torch.bfloat16)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config(scheme, ignore=["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(folder: Path, drop: tuple[str, ...] = (), **add: torch.Tensor) -> None:
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in drop}
    save_file(tensors | add, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_every_family_is_required_and_read(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model(family, tmp_path, shards=2))
    stored = {}
    for file in tmp_path.glob("*.safetensors"):
        stored |= load_file(file)
    assert (
        checkpoint.names()
        == stored.keys()
        == required_tensors(checkpoint.config, checkpoint.quantization).keys()
    )
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in stored.items())
    assert checkpoint.header("model.norm.weight") == ((64,), "F32")
    assert checkpoint.num_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert not checkpoint.is_quantized
    assert checkpoint.scheme(Q_PROJ) == Dense()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_quantized_modules_are_read_as_their_scheme_lists_them(scheme: Scheme, tmp_path: Path) -> None:
    dense = load_file(tiny_model("qwen2", tmp_path / "dense", dtype="bfloat16") / "model.safetensors")
    checkpoint = open_checkpoint(quantized(tmp_path / "q", scheme, "qwen2"))
    assert checkpoint.is_quantized
    assert checkpoint.scheme(Q_PROJ) == scheme
    assert checkpoint.scheme("lm_head") == Dense()
    expected = scheme.quantize(dense[f"{Q_PROJ}.weight"], dtype=torch.bfloat16)
    found = checkpoint.module(Q_PROJ)
    assert found.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert found[suffix].dtype == tensor.dtype
        assert torch.equal(found[suffix].float(), tensor.float())
    assert torch.equal(checkpoint.tensor(f"{Q_PROJ}.bias"), dense[f"{Q_PROJ}.bias"])


def test_q19_missing_shard(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: model-00002-of-00003\S+, model-00003-of-00003\S+$"):
        open_checkpoint(tmp_path)


def test_q19_index_names_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    index_file = tiny_model("llama", tmp_path, shards=2) / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model.layers.9.mlp.up_proj.weight \(model-00001-of-00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["sub/x.safetensors", "../evil.safetensors", "/x", "a\\b", "..", "", 3, []])
def test_an_index_lists_files_of_its_own_folder_only(tmp_path: Path, name: object) -> None:
    index_file = tiny_model("llama", tmp_path, shards=2) / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match="which is no file name of its folder"):
        open_checkpoint(tmp_path)


def test_q19_shards_without_an_index(tmp_path: Path) -> None:
    (tiny_model("llama", tmp_path, shards=2) / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="several weight files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_q19_each_missing_tensor_of_a_quantized_linear_is_named(scheme: Scheme, tmp_path: Path) -> None:
    folder = quantized(tmp_path, scheme)
    lost = tuple(f"{Q_PROJ}.{suffix}" for suffix in scheme.specs(64, 64))
    change(folder, drop=(*lost, "model.norm.weight"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for name in (*lost, "model.norm.weight"):
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_q19_empty_folder_no_folder_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tiny_model("llama", tmp_path / "m") / "model.safetensors").unlink()
    (tmp_path / "m" / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has no weights \(\*.safetensors\); it has pytorch_model.bin"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_q19_file_that_is_cut_off(keep: int, tmp_path: Path) -> None:
    file = tiny_model("llama", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors is (cut off|not a safetensors file)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link that leads nowhere"])
def test_q19_weights_that_are_no_file(kind: str, tmp_path: Path) -> None:
    file = tiny_model("llama", tmp_path / "m") / "model.safetensors"
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no file that can be read"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    "entry",
    [
        *('{"dtype": [], "shape": [1], "data_offsets": [0, "x"]}', '{"dtype": "F32", "shape": [1.5]}'),
        *('{"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}', "7", "null", "[" * 100_000),
        '{"dtype": "F32", "shape": [1], "data_offsets": [0]}',
    ],
)
def test_q19_header_that_says_other_things(entry: str, tmp_path: Path) -> None:
    file = tiny_model("llama", tmp_path) / "model.safetensors"
    header = f'{{"model.norm.weight": {entry}}}'.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        open_checkpoint(tmp_path)


def test_q19_shape_and_type_are_checked(tmp_path: Path) -> None:
    folder = quantized(tmp_path, W8A8Int8())
    change(
        folder,
        **{
            f"{Q_PROJ}.weight": torch.zeros(64, 64, dtype=torch.uint8),
            f"{Q_PROJ}.weight_scale": torch.zeros(32, 2, dtype=torch.bfloat16),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert f"{Q_PROJ}.weight is [64, 64] U8, not [64, 64] I8" in str(caught.value)
    assert f"{Q_PROJ}.weight_scale is [32, 2] BF16, not [64, 1]" in str(caught.value)


def test_q21_quantized_weights_without_a_configuration_are_never_taken_for_dense(tmp_path: Path) -> None:
    folder = quantized(tmp_path, W8A8Int8())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is .* I8, not"):
        open_checkpoint(folder)


def test_q21_wherever_the_configuration_is_the_logits_are_the_same(tmp_path: Path) -> None:
    folder = quantized(tmp_path, W4A16(32, False))
    config = json.loads((folder / "config.json").read_text())
    ours = config.pop("quantization_config")
    text = {key: value for key, value in ours.items() if key != "quant_method"}
    text["config_groups"] = json.loads(json.dumps(text["config_groups"]).replace('": 4,', '": "4",'))
    layouts: list[tuple[dict, dict[str, dict]]] = [
        ({**config, "quantization_config": ours}, {}),
        ({**config, "quantization_config": text}, {}),  # names no method, and its bits are words
        ({**config, "compression_config": ours}, {}),
        (config, {"quantization_config.json": ours}),
    ]
    assert '"num_bits": "4"' in json.dumps(text)
    found, ids = [], torch.arange(9)
    for written, files in layouts:
        (folder / "config.json").write_text(json.dumps(written))
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        checkpoint = open_checkpoint(folder)
        assert {checkpoint.scheme(module) for module in all_modules(checkpoint.config)} == {W4A16(32, False)}
        decoder = load_decoder(checkpoint)
        with torch.inference_mode():
            found.append(decoder.logits(decoder.forward(ids, ids, CausalAttention(1))))
    assert found[0].isfinite().all()
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


def test_scales_of_any_float_type_are_read(tmp_path: Path) -> None:
    folder = quantized(tmp_path, W8A8Int8())
    change(folder, **{f"{Q_PROJ}.weight_scale": torch.ones(64, 1, dtype=torch.float32)})
    assert open_checkpoint(folder).module(Q_PROJ)["weight_scale"].dtype == torch.float32


def test_scales_may_leave_out_a_dimension_of_one(tmp_path: Path) -> None:
    folder = quantized(tmp_path, W8A8Int8())
    change(folder, **{f"{Q_PROJ}.weight_scale": torch.arange(64, dtype=torch.float32)})
    scale = open_checkpoint(folder).module(Q_PROJ)["weight_scale"]
    assert torch.equal(scale, torch.arange(64, dtype=torch.float32).view(64, 1))


def edit_quantization(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_q09_linears_that_run_as_one_must_have_one_scheme(tmp_path: Path) -> None:
    folder = edit_quantization(quantized(tmp_path, W8A8Int8()), ignore=["lm_head", Q_PROJ])
    with pytest.raises(
        CheckpointError, match=r"model.layers.0.\* has self_attn.q_proj dense.*self_attn.k_proj w8a8"
    ):
        open_checkpoint(folder)


def test_q09_entry_that_matches_nothing_warns(tmp_path: Path) -> None:
    folder = edit_quantization(quantized(tmp_path, W8A8Int8()), ignore=["lm_head", "typo_proj"])
    with pytest.warns(UserWarning, match="'typo_proj' in quantization_config matches no linear"):
        assert isinstance(open_checkpoint(folder), Checkpoint)


def test_quantized_lm_head_and_groups_in_an_order_that_nobody_declared_are_refused(tmp_path: Path) -> None:
    folder = edit_quantization(quantized(tmp_path, W8A8Int8()), ignore=[])
    with pytest.raises(UnsupportedModelError, match="quantized lm_head"):
        open_checkpoint(folder)
    folder = quantized(tmp_path / "g_idx", W4A16(32, True))
    change(folder, **{f"{Q_PROJ}.weight_g_idx": torch.zeros(64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"q_proj.weight_g_idx, but .* says nothing of an order"):
        open_checkpoint(folder)


def test_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model("llama", tmp_path))
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.7\.x"):
        checkpoint.tensor("model.layers.7.x")
    (tmp_path / "model.safetensors").write_bytes(b"gone")
    with pytest.raises(
        CheckpointError, match=r"tensor model.norm.weight cannot be read from .*model.safetensors"
    ):
        checkpoint.tensor("model.norm.weight")
