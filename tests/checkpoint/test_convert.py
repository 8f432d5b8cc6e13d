"""`qinfer convert`: the same codes, zero points and scales under other names, and back, bit for bit."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from safetensors.torch import load_file, save_file
from torch import Tensor

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.convert import convert
from qinfer.checkpoint.names import all_modules, router, unquantized
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.cli import main
from qinfer.engine.kv_pool import scales_in
from qinfer.errors import UserError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W4A16, Dense, Scheme, W4A16Ordered, W8A8Fp8Static, W8A8Int8, W8A16Int8
from qinfer.testing import MIXTURES, tiny_model

EXACT = {  # what each dialect can hold
    "awq": [W4A16(32, False), W4A16(64, False), W4A16(32, True)],
    "gptq": [W4A16(32, False), W4A16(32, True), W4A16(64, True), W8A16Int8()],
    "compressed-tensors": [W4A16(32, False), W8A16Int8(), W8A8Int8()],
}


def quantized(
    folder: Path,
    scheme: Scheme,
    *,
    family: str = "qwen2",
    dtype: str = "float16",
    dense: tuple[str, ...] = (),
) -> Checkpoint:
    """A tiny model in that scheme but for the linears named in `dense`."""
    source = open_checkpoint(tiny_model(family, folder / "source", dtype=dtype))
    writer = CheckpointWriter(source, folder / "quantized")
    for name in source.names():
        module = name.removesuffix(".weight")
        if module not in all_modules(source.config) or module in dense:
            writer.add(name, source.tensor(name))
            continue
        tensors = scheme.quantize(source.tensor(name), dtype=getattr(torch, dtype))
        if isinstance(scheme, W8A8Fp8Static):
            tensors = scheme.with_input_range(tensors, 8.0)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    writer.finish(quantization_config(scheme, ignore=[*unquantized(source.config), *dense]))
    return open_checkpoint(folder / "quantized")


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {
        f"{module}.{suffix}": tensor
        for module in all_modules(checkpoint.config)
        for suffix, tensor in checkpoint.module(module).items()
    }


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("to", "scheme"), [(to, scheme) for to in EXACT for scheme in EXACT[to]], ids=lambda value: str(value)
)
def test_there_and_back_is_exact(to: str, scheme: Scheme, tmp_path: Path) -> None:
    source = quantized(tmp_path, scheme)
    done = convert(source, tmp_path / "out", to)
    assert (done.linears, done.dense_linears, done.rounded_scales) == (14, 0, 0)
    out = open_checkpoint(tmp_path / "out")
    asymmetric = to == "awq" and scheme == W4A16(32, True)  # AWQ writes the zero point 8 out
    if not asymmetric:
        assert {out.scheme(module) for module in all_modules(out.config)} == {scheme}
        assert_same(source, out)
    convert(out, tmp_path / "back", "compressed-tensors")
    back = open_checkpoint(tmp_path / "back")
    for module in all_modules(source.config):
        meant = scheme.dequantize(source.module(module))
        assert torch.equal(back.scheme(module).dequantize(back.module(module)), meant)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert torch.equal(back.tensor(name), source.tensor(name))
    assert (tmp_path / "back" / "tokenizer.json").is_file()


@pytest.mark.parametrize("symmetric", [True, False])
def test_published_converter_reads_our_awq(symmetric: bool, tmp_path: Path) -> None:
    source = quantized(tmp_path, W4A16(32, symmetric))
    convert(source, tmp_path / "awq", "awq")
    raw = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    converter = AutoAWQConverter.from_autoawq_config(raw)
    read = converter.process(load_file(tmp_path / "awq" / "model.safetensors"))
    for module in all_modules(source.config):
        tensors = {suffix: read[f"{module}.{suffix}"] for suffix in W4A16(32, False).specs(64, 64)}
        meant = W4A16(32, symmetric).dequantize(source.module(module))
        assert torch.equal(W4A16(32, False).dequantize(tensors), meant)


def test_dense_linears_stay_dense_and_are_named(tmp_path: Path) -> None:
    dense = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj")
    source = quantized(tmp_path, W4A16(32, False), dense=dense)
    for to, said in (
        ("awq", {"modules_to_not_convert": list(dense)}),
        ("gptq", {"dynamic": {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in dense}}),
        ("compressed-tensors", {"ignore": ["lm_head", *dense]}),
    ):
        assert convert(source, tmp_path / to, to).dense_linears == 2
        out = open_checkpoint(tmp_path / to)
        assert {module for module in all_modules(out.config) if out.scheme(module) == Dense()} == set(dense)
        assert out.raw_config["quantization_config"].items() >= said.items()
        assert torch.equal(out.tensor(f"{dense[0]}.weight"), source.tensor(f"{dense[0]}.weight"))


def test_act_order_goes_over_to_compressed_tensors(tmp_path: Path) -> None:
    source = quantized(tmp_path, W4A16(32, True))
    convert(source, tmp_path / "gptq", "gptq")
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    for name in list(tensors):
        if name.endswith(".g_idx"):
            tensors[name] = tensors[name].flip(0)  # groups of the inputs from the last to the first
    save_file(tensors, tmp_path / "gptq" / "model.safetensors", metadata={"format": "pt"})
    ordered = open_checkpoint(tmp_path / "gptq")
    convert(ordered, tmp_path / "ct", "compressed-tensors")
    read = open_checkpoint(tmp_path / "ct")
    assert read.scheme("model.layers.0.mlp.up_proj") == W4A16Ordered(32, True)
    assert_same(ordered, read)
    group = read.raw_config["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["actorder"] == "group"
    with pytest.raises(UserError, match="AWQ holds 4-bit weights in groups of neighbours, not w4a16 g32"):
        convert(ordered, tmp_path / "awq", "awq")
    convert(ordered, tmp_path / "again", "gptq")
    assert_same(ordered, open_checkpoint(tmp_path / "again"))


def test_scales_that_float16_rounds_are_counted_and_those_it_loses_refused(tmp_path: Path) -> None:
    source = quantized(tmp_path, W4A16(32, False), dtype="float32")
    done = convert(source, tmp_path / "awq", "awq")
    assert 0.99 < done.rounded_scales / done.scales <= 1
    assert 2**-13 < done.largest_change < 2**-11
    assert "which float16 rounds by up to" in done.to_text()
    tensors = load_file(source.path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name][0, 0] = 1e-9
    save_file(tensors, source.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model.layers.1.mlp.down_proj.scales holds scales that float16"):
        convert(open_checkpoint(source.path), tmp_path / "gptq", "gptq")
    assert not (tmp_path / "gptq").exists()


@pytest.mark.parametrize(
    ("scheme", "to", "said"),
    [
        (W8A8Int8(), "awq", "AWQ holds 4-bit weights in groups of neighbours, not w8a8-int8"),
        (W8A8Int8(), "gptq", "GPTQ holds integer weights alone, not w8a8-int8"),
        (W4A16(32, True), "exl2", "cannot convert to 'exl2'; choose one of compressed-tensors, awq, gptq"),
    ],
)
def test_what_a_dialect_has_no_word_for(scheme: Scheme, to: str, said: str, tmp_path: Path) -> None:
    source = quantized(tmp_path, scheme)
    with pytest.raises(UserError, match=said):
        convert(source, tmp_path / "out", to)
    with pytest.raises(UserError, match=r"is not quantized: quantize it first"):
        convert(open_checkpoint(tmp_path / "source"), tmp_path / "out", "gptq")
    assert not (tmp_path / "out").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = quantized(tmp_path, W4A16(32, True))
    with pytest.raises(SystemExit) as left:
        main(["convert", str(source.path), "--to", "gptq", "--out", str(tmp_path / "out"), "--json"])
    assert left.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["read_as"] == "compressed-tensors"
    assert (document["to"], document["scheme"], document["linears"]) == ("gptq", "w4a16 g32 sym", 14)
    own = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert (own["bits"], own["group_size"], own["sym"], own["desc_act"]) == (4, 32, True, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_checkpoint(tmp_path / "out").quantization.method == "gptq"
    with pytest.raises(SystemExit) as left:
        main(["convert", str(source.path), "--out", str(tmp_path / "out")])
    assert left.value.code == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("to", ["awq", "gptq", "compressed-tensors"])
def test_experts_go_over_and_run(family: str, to: str, tmp_path: Path) -> None:
    source = quantized(tmp_path, W4A16(32, False), family=family)
    assert convert(source, tmp_path / "out", to).linears == 2 * (4 + 3 * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an entry in `ignore` that names no linear: the routers' does
        out = open_checkpoint(tmp_path / "out")
    assert_same(source, out)
    settings = json.dumps(out.raw_config["quantization_config"]).replace("\\", "")
    assert router(source.config) in settings  # other readers would look for a packed one
    token_ids = torch.arange(16)
    logits = []
    for checkpoint in (source, out):
        decoder = load_decoder(checkpoint, dtype=torch.float32)
        with torch.inference_mode():
            hidden = decoder.forward(token_ids, token_ids, CausalAttention(1))
            logits.append(decoder.logits(hidden))
    assert torch.equal(*logits)


def test_modelopt_goes_over_with_its_kv_scales(tmp_path: Path) -> None:
    source = quantized(tmp_path, W8A8Fp8Static())
    tensors = load_file(source.path / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("weight_scale", "input_scale")):
            tensors[name] = tensors[name].float().reshape(())
    scales = {
        f"model.layers.{i}.self_attn.{x}_proj.{x}_scale": torch.tensor(0.5) for i in range(2) for x in "kv"
    }
    save_file(tensors | scales, source.path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source.path / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
    }
    (source.path / "config.json").write_text(json.dumps(raw))
    modelopt = open_checkpoint(source.path)
    convert(modelopt, tmp_path / "ct", "compressed-tensors")
    out = open_checkpoint(tmp_path / "ct")
    assert_same(modelopt, out)
    assert out.header("model.layers.0.mlp.up_proj.weight_scale") == ((1,), "F32")
    assert out.header("model.layers.1.self_attn.v_scale") == ((1,), "F32")
    assert scales_in(out) == scales_in(modelopt) == {0: (0.5, 0.5), 1: (0.5, 0.5)}
    assert out.quantization.kv_cache_scheme == modelopt.quantization.kv_cache_scheme
