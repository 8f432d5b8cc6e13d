"""Methods and schemes beyond the presets, through the whole pipeline on tiny models."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.calibrate import pipeline
from qinfer.calibrate.block import dense_layer, embed_batches, load_block, observe
from qinfer.calibrate.gram import Inputs
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules, layer_groups
from qinfer.errors import CheckpointError, UserError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W8A8Int8
from qinfer.testing import error_ratio, tiny_model
from qinfer.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(16)]


def _run(path, out, **arguments):
    arguments = {"calibration": TEXT, "max_seq_len": 64, "num_samples": 16, **arguments}
    job = prepare_job(open_checkpoint(path), Tokenizer.load(path), out, Settings(**arguments))
    return pipeline.run(replace(job, dtype=torch.float32), progress=False)


def _logits(path):
    decoder = load_decoder(open_checkpoint(path), dtype=torch.float32)
    ids = torch.tensor(Tokenizer.load(path).encode("What does the quantized model say to this?"))
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids, torch.arange(len(ids)), CausalAttention(1)))


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
@pytest.mark.parametrize(
    ("scheme", "method", "bound"),
    [
        ("w4a16", "gptq", 0.4),
        ("w4a16", "awq+gptq", 0.4),
        ("w8a8-int8", "smoothquant+gptq", 0.06),
        ("w8a8-fp8", "gptq", 0.12),
        ("w8a8-fp8-static", "rtn", 0.12),
        ("w8a8-fp8-static", "smoothquant+gptq", 0.13),
        ("w8a8-fp8-block", "gptq", 0.12),
        ("w8a16-fp8", "gptq", 0.1),
        ("w8a16-int8", "awq", 0.03),
    ],
)
def test_every_pair_stays_close_to_its_source(family, scheme, method, bound, tmp_path):
    source = tiny_model(family, tmp_path / "source", dtype="bfloat16")
    report = _run(source, tmp_path / "out", scheme=scheme, method=method)
    result = open_checkpoint(tmp_path / "out")
    assert {result.scheme(m).label for m in all_modules(result.config)} == {report.scheme}
    assert error_ratio(_logits(tmp_path / "out"), _logits(source)) < bound
    assert not any(layer.notes for layer in report.layers)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8-int8"])
def test_gptq_leaves_smaller_errors_of_outputs_than_rounding_to_nearest(scheme, tmp_path):
    source = tiny_model("smollm2", tmp_path / "source")
    errors = {}
    for method in ("gptq", "rtn"):
        report = _run(source, tmp_path / method, scheme=scheme, method=method, ranges="imatrix")
        errors[method] = [e for layer in report.layers for e in layer.output_errors.values()]
    if scheme == "w4a16":  # at 8 bits what the activations lose is as much
        assert all(a < b for a, b in zip(errors["gptq"], errors["rtn"], strict=True))
    assert sum(errors["gptq"]) < sum(errors["rtn"])


def test_static_scales_are_those_of_the_inputs_and_shared_by_what_runs_as_one(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    report = _run(source, tmp_path / "out", scheme="w8a8-fp8-static")
    result, original = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    for i, layer in enumerate(report.layers):
        for group in layer_groups(result.config):
            files = [result.module(f"model.layers.{i}.{module}") for module in group.modules]
            weights = [original.tensor(f"model.layers.{i}.{module}.weight") for module in group.modules]
            widest = max(float(weight.abs().max()) for weight in weights)
            for tensors in files:
                assert tensors["input_scale"].tolist() == pytest.approx(
                    [layer.input_absmax[group.name] / 448]
                )
                assert tensors["weight_scale"].tolist() == pytest.approx([widest / 448])


def test_q18_a_static_checkpoint_without_an_input_scale_is_refused_by_name(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    _run(source, tmp_path / "out", scheme="w8a8-fp8-static")
    weights = tmp_path / "out" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.down_proj.input_scale"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.down_proj\.input_scale"):
        open_checkpoint(tmp_path / "out")
    with pytest.raises(UserError, match="num_samples must be a whole number of at least 1"):
        _run(source, tmp_path / "none", scheme="w8a8-fp8-static", num_samples=0)


@pytest.mark.parametrize("scheme", ["gptq", "w8a8-int8"])
def test_c02_dead_inputs_leave_rounding_to_nearest(scheme, tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("input_layernorm.weight"):
            tensor.zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = _run(source, tmp_path / "out", scheme=scheme, method="gptq")
    for layer in report.layers:
        for module in ("q_proj", "k_proj", "v_proj"):
            error = layer.weight_errors[f"self_attn.{module}"]
            assert 0 < error < (0.02 if scheme == "w8a8-int8" else 0.2)
    if scheme == "w8a8-int8":
        result, original = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
        name = "model.layers.1.self_attn.k_proj"
        expected = W8A8Int8().quantize(original.tensor(f"{name}.weight"), dtype=torch.float32)
        assert torch.equal(result.module(name)["weight"], expected["weight"])


def test_c05_batches_of_any_size_give_one_gram(tmp_path, monkeypatch):
    from qinfer.calibrate import block

    checkpoint = open_checkpoint(tiny_model("gemma3", tmp_path / "source"))
    layer = dense_layer(checkpoint.config, 0, load_block(checkpoint, 0), device=CPU, dtype=torch.float32)
    sequences = [tuple(range(i, i + 24)) for i in range(8)]
    grams = []
    for limit in (24, 48, 24 * 8):
        monkeypatch.setattr(block, "MAX_BATCH_TOKENS", limit)
        batches = embed_batches(checkpoint, sequences, search_tokens=10**6, device=CPU, dtype=torch.float32)
        tap = observe(layer, batches)
        grams.append({group: Inputs(tap.inputs[group]).gram for group in ("qkv", "o", "gate_up", "down")})
    for other in grams[1:]:
        for group, gram in grams[0].items():
            assert error_ratio(other[group], gram) < 1e-5


@pytest.mark.parametrize("ranges", ["absmax", "mse", "imatrix", "output"])
def test_ranges_are_told_and_change_the_scales(ranges, tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    report = _run(source, tmp_path / "out", scheme="w4a16", method="rtn", ranges=ranges)
    assert report.ranges == ranges
    for layer in report.layers:
        assert set(layer.clipping) == (set() if ranges == "absmax" else set(layer.weight_errors))
    assert (report.calibration is None) == (ranges in ("absmax", "mse"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "w4a16", "ranges": "best"}, "unknown ranges 'best'; choose one of absmax, mse, imatrix"),
        ({"scheme": "w8a8-int8", "ranges": "output"}, "are searched for groups of weights"),
        ({"scheme": "w8a8-fp8-block", "ranges": "mse"}, "one scale for many rows"),
        ({"scheme": "w8a8-fp8", "method": "awq+gptq"}, "use smoothquant, gptq or rtn"),
        ({"scheme": "w4a16", "method": "smoothquant+gptq"}, "use awq, gptq or rtn"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(arguments, message, tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    with pytest.raises(UserError, match=message):
        _run(source, tmp_path / "out", **arguments)
