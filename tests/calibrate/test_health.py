"""A checkpoint with an unusable scale, a missing or a stray tensor is never finished."""

import pytest
import torch

from qinfer.calibrate import health, pipeline
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.names import all_modules, global_tensors, layer_tensors
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError
from qinfer.quant import W4A16, W8A8Int8
from qinfer.testing import tiny_config, tiny_model
from qinfer.tokenizer import Tokenizer

SCHEME = W4A16(32, False)
SHAPE = (16, 64)


def _tensors():
    return SCHEME.quantize(torch.randn(SHAPE), dtype=torch.bfloat16)


def _check(tensors):
    health.check_linear("m", tensors, SCHEME, SHAPE, torch.bfloat16)


def test_what_a_scheme_makes_is_healthy():
    _check(_tensors())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_unusable_scale_is_named(value):
    tensors = _tensors()
    tensors["weight_scale"][3, 1] = value
    with pytest.raises(CheckpointError, match=r"m\.weight_scale"):
        _check(tensors)


def test_missing_misshapen_and_mistyped_tensors_are_named():
    tensors = _tensors()
    packed = tensors.pop("weight_packed")
    with pytest.raises(CheckpointError, match=r"m\.weight_packed is missing"):
        _check(tensors)
    with pytest.raises(CheckpointError, match=r"m\.weight_packed is torch.int32 \[15, 8\]"):
        _check({**tensors, "weight_packed": packed[:15]})
    with pytest.raises(CheckpointError, match=r"m\.weight_scale is torch.float32"):
        _check({**_tensors(), "weight_scale": tensors["weight_scale"].float()})


def test_dense_tensor_with_nan_is_named():
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN"):
        health.check_finite("model.norm.weight", torch.tensor([1.0, float("nan")]))


def test_expected_names_replace_each_weight_by_the_schemes_tensors():
    config = ModelConfig.from_dict(tiny_config("qwen2"))
    source = {n for i in range(2) for n in layer_tensors(config, i)} | set(global_tensors(config))
    expected = health.expected_names(config, lambda _: W8A8Int8(), source)
    module = "model.layers.1.self_attn.q_proj"
    assert {f"{module}.weight", f"{module}.weight_scale", f"{module}.bias"} <= expected
    assert len(expected) == len(source) + len(all_modules(config))
    health.check_complete(expected, set(expected))
    with pytest.raises(CheckpointError, match=r"1 tensors missing .*: model\.norm\.weight"):
        health.check_complete(expected, expected - {"model.norm.weight"})
    with pytest.raises(CheckpointError, match=r"1 tensors unexpected .*: stray"):
        health.check_complete(expected, expected | {"stray"})


def test_files_that_are_not_what_was_asked_for_are_named(tmp_path):
    source = open_checkpoint(tiny_model("llama", tmp_path / "source"))
    job = prepare_job(source, Tokenizer.load(source.path), tmp_path / "out", Settings(scheme="fp8"))
    report = pipeline.run(job, progress=False)
    written = open_checkpoint(tmp_path / "out")
    sizes = {"num_bytes": report.bytes_after, "source_bytes": report.bytes_before}
    health.check_written(written, job.scheme_of_module, **sizes)
    assert report.health == health.CHECKS
    module = "model.layers.0.self_attn.q_proj"
    with pytest.raises(CheckpointError, match=rf"{module} reads as w8a8-fp8, and was to be w8a8-int8"):
        health.check_written(written, lambda _: W8A8Int8(), **sizes)
    with pytest.raises(CheckpointError, match=r"weights take \d+ bytes, and were to take"):
        health.check_written(written, job.scheme_of_module, num_bytes=10**7, source_bytes=10**8)
    with pytest.raises(CheckpointError, match="more than 10 before"):
        health.check_written(written, job.scheme_of_module, num_bytes=report.bytes_after, source_bytes=10)


def test_a_linear_left_dense_stops_the_run_and_nothing_appears(tmp_path, monkeypatch):
    source = open_checkpoint(tiny_model("llama", tmp_path / "source"))
    real = Checkpoint.header

    def header(self, name):
        shape, dtype = real(self, name)
        return shape, "BF16" if name == "model.layers.1.mlp.up_proj.weight" else dtype

    job = prepare_job(source, Tokenizer.load(source.path), tmp_path / "out", Settings(scheme="fp8"))
    monkeypatch.setattr(Checkpoint, "header", header)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        pipeline.run(job, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("bad", [0.0, 1e-40, float("nan"), float("inf")])
def test_denormal_scales_are_named(bad):
    tensors = W8A8Int8().quantize(torch.randn(4, 8), dtype=torch.float32)
    tensors["weight_scale"][2, 0] = bad
    with pytest.raises(CheckpointError, match=r"layer\.q\.weight_scale holds a scale"):
        health.check_linear("layer.q", tensors, W8A8Int8(), (4, 8), torch.float32)
