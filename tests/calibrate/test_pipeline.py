"""The whole run on tiny models: what is written, what a layer is calibrated on, and how it fails."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.calibrate import layer as layer_module
from qinfer.calibrate import pipeline
from qinfer.calibrate.block import dense_layer, embed_batches, layer_of, load_block, observe
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules, layer_modules
from qinfer.errors import CheckpointError, UserError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W8A8Int8
from qinfer.testing import FAMILIES, error_ratio, tiny_model
from qinfer.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)] + ["Short."]


def _prepare(path, out, *, generate=None, progress=True, **arguments):
    arguments = {"calibration": TEXT, "max_seq_len": 32, "num_samples": 7, **arguments}
    checkpoint, tokenizer, settings = open_checkpoint(path), Tokenizer.load(path), Settings(**arguments)
    job = prepare_job(checkpoint, tokenizer, out, settings, generate=generate, progress=progress)
    return replace(job, dtype=torch.float32)  # the same on every processor


def _logits(path):
    decoder = load_decoder(open_checkpoint(path), dtype=torch.float32)
    ids = torch.tensor(Tokenizer.load(path).encode("What does the quantized model say to this?"))
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids, torch.arange(len(ids)), CausalAttention(1)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("scheme", "bound"), [("int8", 0.06), ("awq", 0.35)])
def test_every_family_stays_close_to_its_source(family, scheme, bound, tmp_path):
    source = tiny_model(family, tmp_path / "source")
    report = pipeline.run(_prepare(source, tmp_path / "out", scheme=scheme), progress=False)
    result = open_checkpoint(tmp_path / "out")
    assert {result.scheme(m).label for m in all_modules(result.config)} == {report.scheme}
    assert error_ratio(_logits(tmp_path / "out"), _logits(source)) < bound
    for layer in report.layers:
        assert set(layer.output_errors) == {"qkv", "o", "gate_up", "down"}
        assert set(layer.weight_errors) == set(layer_modules(result.config))
        for scale in layer.scales:
            assert scale["loss"] <= scale["unscaled_loss"]
        assert all(share <= 1 for share in layer.clipping.values())
        assert set(layer.clipping) == (set(layer.weight_errors) if scheme == "awq" else set())


@pytest.mark.parametrize("name", ["int8", "fp8", "awq", "w8a16-int8"])
def test_bfloat16_checkpoint_stores_scales_and_norms_in_bfloat16(name, tmp_path):
    source = tiny_model("qwen2", tmp_path / "source", dtype="bfloat16")
    pipeline.run(_prepare(source, tmp_path / "out", scheme=name), progress=False)
    result = open_checkpoint(tmp_path / "out")
    for tensor in ("input_layernorm.weight", "self_attn.v_proj.bias", "self_attn.v_proj.weight_scale"):
        assert result.header(f"model.layers.0.{tensor}")[1] == "BF16"


def test_rtn_reads_no_text_and_equals_the_schemes_own_rounding(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    job = _prepare(source, tmp_path / "out", scheme="w8a8-int8", method="rtn", calibration=None)
    assert job.data is None
    report = pipeline.run(job, progress=False)
    assert report.calibration is None
    result, original = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    for module in all_modules(original.config):
        expected = W8A8Int8().quantize(original.tensor(f"{module}.weight"), dtype=torch.float32)
        got = result.module(module)
        assert all(torch.equal(got[suffix], expected[suffix]) for suffix in expected)


@pytest.mark.parametrize(("method", "scheme"), [("smoothquant", "int8"), ("awq", "awq")])
def test_search_beats_rounding_on_inputs_with_outliers(method, scheme, tmp_path):
    source = tiny_model("smollm2", tmp_path / "source")
    _scale_norms(source, [3, 17, 40], 30.0)
    errors, reports = {}, {}
    for m in (method, "rtn"):
        reports[m] = pipeline.run(_prepare(source, tmp_path / m, scheme=scheme, method=m), progress=False)
        errors[m] = error_ratio(_logits(tmp_path / m), _logits(source))
    assert errors[method] < 0.9 * errors["rtn"]
    for layer in reports[method].layers:
        for scale in layer.scales:
            if scale["mapping"].startswith("norm"):
                assert scale["loss"] < 0.5 * scale["unscaled_loss"]


@pytest.mark.parametrize("scheme", ["int8", "awq"])
def test_c03_dead_and_huge_channels_run_through(scheme, tmp_path):
    """One zero channel, one of 1e5, one zero group of weights: scales stay finite, nothing gets worse."""
    source = tiny_model("smollm2", tmp_path / "source", dtype="bfloat16")
    _scale_norms(source, [3], 0.0)
    _scale_norms(source, [17], 1e5)
    _change(source, "mlp.down_proj.weight", lambda w: w[:, 32:64].zero_())
    report = pipeline.run(_prepare(source, tmp_path / "out", scheme=scheme), progress=False)
    assert torch.isfinite(_logits(tmp_path / "out")).all()
    for layer in report.layers:
        for scale in layer.scales:
            assert 0 <= scale["loss"] <= scale["unscaled_loss"] < float("inf")
    result = open_checkpoint(tmp_path / "out")
    for i in range(2):
        gain = result.tensor(f"model.layers.{i}.input_layernorm.weight")
        assert gain[3] == 0
        assert torch.isfinite(gain).all()


def _scale_norms(folder, channels, factor):
    def scale(gain):
        gain[channels] *= factor

    _change(folder, "layernorm.weight", scale)


def _change(folder, suffix, change):
    """Rewrites, in place, every tensor of a layer whose name ends so."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and name.endswith(suffix):
            change(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_c09_a_layer_is_calibrated_on_the_quantized_layers_before_it(tmp_path, monkeypatch):
    """Layer 1's inputs equal a hand run through layer 0 as it lies in the finished checkpoint."""
    source = tiny_model("llama", tmp_path / "source")
    seen = []

    def spy(layer, batches):
        tap = observe(layer, batches)
        seen.append(tap)
        return tap

    monkeypatch.setattr(layer_module, "observe", spy)
    job = _prepare(source, tmp_path / "out", scheme="int8")
    pipeline.run(job, progress=False)
    checkpoint, result = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    batches = embed_batches(
        checkpoint, job.data.sequences, search_tokens=10**6, device=CPU, dtype=torch.float32
    )
    modules = layer_modules(result.config)
    linears = {m: (W8A8Int8(), result.module(f"model.layers.0.{m}")) for m in modules}
    others = {
        name: result.tensor(f"model.layers.0.{name}").float()
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }
    with torch.inference_mode():
        first = layer_of(result.config, 0, others, linears, device=CPU, dtype=torch.float32)
        for batch in batches:
            batch.hidden = first(batch.hidden, batch.rope, batch.attend)
        second = dense_layer(result.config, 1, load_block(checkpoint, 1), device=CPU, dtype=torch.float32)
        by_hand = observe(second, batches)
    for group in ("qkv", "o", "gate_up", "down"):
        assert torch.equal(seen[1].stats[group].absmax, by_hand.stats[group].absmax)
        assert torch.equal(seen[1].stats[group].mean, by_hand.stats[group].mean)


@pytest.mark.parametrize("scheme", ["int8", "awq"])
def test_c02_dead_inputs_leave_rounding_to_nearest(scheme, tmp_path):
    """A norm of zeros makes every input of q/k/v zero: the weights keep their usual error."""
    source = tiny_model("llama", tmp_path / "source")
    _scale_norms(source, list(range(64)), 0.0)
    report = pipeline.run(_prepare(source, tmp_path / "out", scheme=scheme), progress=False)
    bound = 0.02 if scheme == "int8" else 0.2
    for layer in report.layers:
        assert all(0 < error < bound for error in layer.weight_errors.values())
        assert layer.output_errors["qkv"] == 0.0


def test_c06_sequences_of_all_lengths_count(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    checkpoint = open_checkpoint(source)
    sequences = [tuple(range(1, 50)), tuple(range(60, 96)), tuple(range(1, 50))]
    layer = dense_layer(checkpoint.config, 0, load_block(checkpoint, 0), device=CPU, dtype=torch.float32)
    taps = []
    for order in (sequences, sequences[::-1]):
        batches = embed_batches(checkpoint, order, search_tokens=40, device=CPU, dtype=torch.float32)
        assert {b.num_sequences * len(b.hidden) // b.num_sequences for b in batches} <= {98, 49, 36}
        taps.append(observe(layer, batches))
    alone = [
        observe(layer, embed_batches(checkpoint, [s], search_tokens=40, device=CPU, dtype=torch.float32))
        for s in sequences
    ]
    for group in ("qkv", "o", "gate_up", "down"):
        assert taps[0].stats[group].num_tokens == 49 + 36 + 49
        highest = torch.stack([tap.stats[group].absmax for tap in alone]).amax(0)
        for tap in taps:
            torch.testing.assert_close(tap.stats[group].absmax, highest, rtol=1e-5, atol=1e-6)


def test_c05_batches_of_equal_lengths_change_no_statistic(tmp_path, monkeypatch):
    from qinfer.calibrate import block

    checkpoint = open_checkpoint(tiny_model("gemma3", tmp_path / "source"))
    layer = dense_layer(checkpoint.config, 0, load_block(checkpoint, 0), device=CPU, dtype=torch.float32)
    sequences = [tuple(range(i, i + 24)) for i in range(8)]
    taps = []
    for limit in (24, 48, 24 * 8):
        monkeypatch.setattr(block, "MAX_BATCH_TOKENS", limit)
        batches = embed_batches(checkpoint, sequences, search_tokens=1, device=CPU, dtype=torch.float32)
        taps.append(observe(layer, batches))
    for group in ("qkv", "o", "gate_up", "down"):
        for tap in taps[1:]:
            torch.testing.assert_close(tap.stats[group].mean, taps[0].stats[group].mean, rtol=1e-5, atol=1e-7)


def test_search_runs_on_evenly_spread_sequences(tmp_path):
    checkpoint = open_checkpoint(tiny_model("llama", tmp_path / "source"))
    sequences = [(i,) * 10 for i in range(12)]
    batches = embed_batches(checkpoint, sequences, search_tokens=40, device=CPU, dtype=torch.float32)
    kept = [b for b in batches if b.keep]
    table = checkpoint.tensor("model.embed_tokens.weight").float()
    assert [b.num_sequences for b in kept] == [4]
    assert torch.equal(kept[0].hidden[::10], table[[0, 3, 6, 9]])
    assert sum(b.num_sequences for b in batches) == 12


def test_bfloat16_activations_find_nearly_the_same_model(tmp_path):
    source = tiny_model("smollm2", tmp_path / "source")
    for out, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        job = replace(_prepare(source, tmp_path / out, scheme="int8"), dtype=dtype)
        pipeline.run(job, progress=False)
    errors = [error_ratio(_logits(tmp_path / out), _logits(source)) for out in ("a", "b")]
    assert errors[1] < 1.2 * errors[0]


def test_same_seed_same_bytes(tmp_path):
    source = tiny_model("qwen3", tmp_path / "source")
    for out in ("a", "b"):
        pipeline.run(_prepare(source, tmp_path / out, scheme="awq"), progress=False)
    a, b = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b"))
    assert a == b


def test_report_lies_beside_the_weights(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    report = pipeline.run(_prepare(source, tmp_path / "out", scheme="awq"), progress=False)
    read = json.loads((tmp_path / "out" / "qinfer_report.json").read_text())
    assert read == json.loads(report.to_json())
    assert read["scheme"] == "w4a16 g64 asym"
    assert read["calibration"]["num_sequences"] == 7
    assert (
        read["calibration"]["sha256"]
        == _prepare(source, tmp_path / "x", scheme="awq").data.record()["sha256"]
    )
    assert [s["mapping"] for s in read["layers"][0]["scales"]] == [
        "norm->qkv",
        "v->o",
        "norm->gate_up",
        "up->down",
    ]
    assert "7 sequences" in report.to_text()


def test_q07_lowered_group_size_is_said(tmp_path, caplog):
    source = tiny_model("llama", tmp_path / "source")
    with caplog.at_level(logging.WARNING):
        job = _prepare(source, tmp_path / "out", scheme="awq")
    assert "using 64 for the whole model" in caplog.text
    assert pipeline.run(job, progress=False).notes == job.recipe.notes


def test_rtn_says_that_text_is_not_read(tmp_path, caplog):
    _prepare(tiny_model("llama", tmp_path / "source"), tmp_path / "out", scheme="fp8")
    assert "calibration text is not read" in caplog.text


def test_nan_weight_stops_the_run_and_leaves_nothing(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    _change(source, "layers.1.mlp.up_proj.weight", lambda w: w[3, 4].fill_(float("nan")))
    for scheme in ("fp8", "int8", "awq"):
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
            pipeline.run(_prepare(source, tmp_path / "out", scheme=scheme), progress=False)
        assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_forgotten_tensor_stops_the_run(tmp_path, monkeypatch):
    source = tiny_model("llama", tmp_path / "source")
    real = pipeline._quantize_layer

    def forgetful(*arguments):
        layer = real(*arguments)
        layer.tensors.pop("model.layers.1.mlp.down_proj.weight_scale", None)
        return layer

    monkeypatch.setattr(pipeline, "_quantize_layer", forgetful)
    with pytest.raises(CheckpointError, match=r"missing .*down_proj\.weight_scale"):
        pipeline.run(_prepare(source, tmp_path / "out", scheme="fp8"), progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] not enough memory: you tried")]
)
def test_c08_lack_of_memory_names_the_two_limits(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(layer_module, "observe", fail)
    job = _prepare(tiny_model("llama", tmp_path / "source"), tmp_path / "out")
    with pytest.raises(UserError, match="num_samples or max_seq_len"):
        pipeline.run(job, progress=False)


def test_other_errors_are_not_disguised(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(layer_module, "observe", fail)
    job = _prepare(tiny_model("llama", tmp_path / "source"), tmp_path / "out")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        pipeline.run(job, progress=False)
    assert not list(tmp_path.glob("out*"))


def test_quantized_source_and_too_long_sequences_are_refused(tmp_path):
    source = tiny_model("llama", tmp_path / "source")
    pipeline.run(_prepare(source, tmp_path / "q", scheme="fp8"), progress=False)
    with pytest.raises(UserError, match="quantized already"):
        _prepare(tmp_path / "q", tmp_path / "out")
    with pytest.raises(UserError, match="max_seq_len is 500, the model's context 256"):
        _prepare(source, tmp_path / "out", max_seq_len=500)


def test_a_run_without_progress_writes_its_text_in_silence(tmp_path, capsys):
    source = tiny_model("llama", tmp_path / "source")
    _prepare(source, tmp_path / "out", calibration="self", num_samples=1, progress=False)
    assert capsys.readouterr() == ("", "")
    _prepare(source, tmp_path / "out", calibration="self", num_samples=1)
    assert "writing calibration text: 100%" in capsys.readouterr().err


def test_output_folder_that_holds_something_is_refused_before_any_text_is_written(tmp_path):
    def generate(*_):
        raise AssertionError("too early")

    source = tiny_model("llama", tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is not empty"):
        _prepare(source, tmp_path / "out", calibration="self", generate=generate)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "out.partial").exists()
