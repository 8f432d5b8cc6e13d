"""What a run is planned to take, against what it takes."""

import json
from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import dry_run, mixed_run, needs, pace, pipeline
from qinfer.calibrate.mixing import average_bits
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.recipe import settle
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.dummy import open_dummy
from qinfer.checkpoint.names import layer_modules, num_weights
from qinfer.config import ModelConfig
from qinfer.engine.footprint import format_size
from qinfer.errors import UserError
from qinfer.quant import SCHEMES, W4A16, scheme_by_name
from qinfer.testing import tiny_config, tiny_model
from qinfer.tokenizer import Tokenizer

TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen2"])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "awq", "w8a16-int8", "w8a8-fp8-block"])
def test_disk_is_what_is_written(family, scheme, tmp_path):
    source = open_checkpoint(tiny_model(family, tmp_path / "source", dtype="bfloat16"))
    planned = dry_run.plan(source, tmp_path / "out", Settings(scheme=scheme, method="rtn"))
    job = prepare_job(
        source, Tokenizer.load(source.path), tmp_path / "out", Settings(scheme=scheme, method="rtn")
    )
    pipeline.run(job, progress=False)
    result = open_checkpoint(tmp_path / "out")
    headers = [result.header(name) for name in result.names()]
    sizes = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1}
    written = sum(torch.Size(shape).numel() * sizes[dtype] for shape, dtype in headers)
    biases = sum(
        2 * shape[0]
        for name in result.names()
        if name.endswith(".bias")
        for shape in [result.header(name)[0]]
    )
    assert planned.disk["checkpoint"] == written - biases


def test_memory_depends_on_one_layer_and_on_the_text(tmp_path):
    config = ModelConfig.from_dict(tiny_config("llama"))
    work = _work(config, "gptq", tokens=4096)
    deep = replace(work, config=replace(config, num_layers=80))
    assert needs.memory(deep) == needs.memory(work)
    assert needs.disk(deep)["checkpoint"] > 20 * needs.disk(work)["checkpoint"] - 20 * work.other_bytes
    more = needs.memory(replace(work, tokens=8192))
    assert more["streams"] == 2 * needs.memory(work)["streams"]
    assert needs.memory(replace(work, tokens=0)).keys() <= {"layer in float32", "file tensors", "rounding"}


def test_on_a_gpu_lies_one_layer_and_one_batch():
    config = ModelConfig.from_dict(tiny_config("llama"))
    here, there = (replace(_work(config, "awq", 1 << 20), on_gpu=gpu) for gpu in (False, True))
    assert needs.gpu_memory(here) == {}
    assert needs.gpu_memory(there) == needs.gpu_memory(replace(there, tokens=1 << 21))
    assert needs.gpu_memory(there)["layer in float32"] == needs.memory(here)["layer in float32"]
    assert needs.memory(there)["streams"] == there.stream_bytes < needs.memory(here)["streams"]
    assert needs.memory(replace(there, on_disk=True))["streams"] == 0


def test_streams_go_to_the_disk_where_memory_does_not_suffice():
    work = _work(ModelConfig.from_dict(tiny_config("llama")), "awq", 1 << 20)
    here = sum(needs.memory(work).values())
    assert not needs.spills(work, 2 * here)
    assert needs.spills(work, here)
    assert not needs.spills(replace(work, tokens=0), 1)  # no streams to spill
    spilled = replace(work, on_disk=True)
    assert sum(needs.memory(spilled).values()) < here / 10
    assert needs.disk(spilled)["streams"] - needs.disk(work)["streams"] == work.stream_bytes


def _work(config, scheme, tokens):
    return needs.Work(config, settle(config, scheme), tokens, 512, 2)


def test_time_counts_what_methods_do():
    config = ModelConfig.from_dict(tiny_config("llama"))
    efforts = {m: pace.effort(_work(config, m, 8192)) for m in ("int8", "awq", "gptq")}
    rtn = pace.effort(_work(config, "fp8", 0))
    assert rtn.products == rtn.quantized == rtn.float32 == 0
    assert efforts["awq"].quantized > efforts["int8"].quantized > efforts["gptq"].quantized
    assert efforts["gptq"].float32 > efforts["int8"].float32 == 0
    assert all(effort.passes > rtn.passes for effort in efforts.values())
    assert efforts["gptq"].calls > efforts["awq"].calls > efforts["int8"].calls > rtn.calls > 0
    assert all(effort.copies > rtn.copies > 0 for effort in efforts.values())
    with_codes, without = (
        pace.effort(needs.Work(config, settle(config, name, "gptq"), 8192, 512, 2))
        for name in ("w8a8-fp8", "w8a16-fp8")
    )
    inputs, outputs = 3 * 64 + 128, 192 + 64 + 256 + 64
    assert with_codes.passes - without.passes == 8192 * (6 * inputs + 3 * outputs)
    speed = pace.Pace(10.0, 5.0, 20.0, 30.0, 50.0, 4.0)
    assert pace.Effort(100.0, 10.0, 100.0, 90.0, 100.0, 4.0).seconds(speed) == 23.0


def test_time_counts_what_sensitivities_take(tmp_path, monkeypatch):
    speed = pace.Pace(8.0, 1.0, 2.0, 7.0, 1.0, 1.0)
    config = ModelConfig.from_dict(tiny_config("llama"))
    weights = _work(config, "awq", 1).layer_weights
    width, vocabulary, tokens = config.hidden_size, config.vocab_size, 512
    whole, head, kl = 2 * tokens * 2 * weights, 2 * tokens * width * vocabulary, tokens * vocabulary
    measured = (whole + head) / 2 + 8 * ((whole / 2 + head) / 2 + kl)  # 8 units, half a model each
    assert mixed_run.measuring_seconds(config, 10**6, speed) == measured
    assert mixed_run.measuring_seconds(config, 256, speed) == measured / 2
    monkeypatch.setattr(mixed_run, "MEASURED_PARAMETERS", 1)
    assert mixed_run.measuring_seconds(config, 10**6, speed) == 3 * (whole + head) / 8
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    monkeypatch.setattr(dry_run, "measured_pace", lambda *_: speed)
    plans = [
        dry_run.plan(open_dummy(tmp_path), tmp_path / "out", Settings(scheme="awq"), mixing=mixing)
        for mixing in (False, True)
    ]
    before = mixed_run.measuring_seconds(config, plans[1].tokens, speed)
    assert plans[1].seconds - plans[0].seconds == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize("name", SCHEMES)
def test_pace_is_measured(name):
    measured = pace.measured_pace(scheme_by_name(name), torch.bfloat16)
    assert all(speed > 0 for speed in measured)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "nf4"}, "unknown scheme"),
        ({"scheme": "awq", "method": "smoothquant"}, "smoothquant moves outliers"),
        ({"scheme": "int8"}, "is not empty"),
        ({"scheme": "int8", "calibration": "nowhere.txt"}, "cannot read the calibration file"),
        ({"scheme": "int8", "kv_scales": "int4"}, "unknown KV scales"),
        ({"scheme": "int8", "num_samples": 0}, "num_samples must be a whole number of at least 1"),
    ],
)
def test_refuses_what_the_run_refuses(settings, message, tmp_path):
    source = open_checkpoint(tiny_model("llama", tmp_path / "source"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    with pytest.raises(UserError, match=message):
        dry_run.plan(source, tmp_path / "out", Settings(**settings))


def test_a_configuration_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    settings = {"scheme": "awq", "num_samples": 3, "max_seq_len": 10, "device": "cpu"}
    (tmp_path / "text.txt").write_text("Text is not read.")
    given = Settings(calibration=str(tmp_path / "text.txt"), **settings)
    planned = dry_run.plan(open_dummy(tmp_path), tmp_path / "out", given)
    assert planned.tokens == 30
    assert "writes some of the text itself" not in planned.to_text()
    itself = dry_run.plan(open_dummy(tmp_path), tmp_path / "out", Settings(**settings))
    assert "the model writes some of the text itself" in itself.to_text()
    assert replace(itself, whole=10**12).peak == itself.process + 10**12
    mixed = dry_run.plan(open_dummy(tmp_path), tmp_path / "out", given, mixing=True)
    assert mixed.whole == 4 * _numbers(open_dummy(tmp_path))
    assert "what its layers do is measured first" in mixed.to_text()
    assert "group size 128 does not divide" in mixed.to_text()
    of_six = dry_run.plan(open_dummy(tmp_path), tmp_path / "out", given, mixing=True, budget=6.0)
    config = open_dummy(tmp_path).config
    weights = config.num_layers * num_weights(config, layer_modules(config))
    bits = average_bits(config, W4A16(64, symmetric=False), {}, 4)
    more = of_six.disk["checkpoint"] - mixed.disk["checkpoint"]
    assert more == pytest.approx((6 - bits) * weights / 8, abs=1)
    assert "up to 6 bits per weight on average" in of_six.to_text()
    with pytest.raises(UserError, match="a budget of 3 bits per weight is not between"):
        dry_run.plan(open_dummy(tmp_path), tmp_path / "out", given, mixing=True, budget=3.0)
    assert planned.peak == planned.process + sum(planned.memory.values())
    assert (planned.device, planned.gpu_peak) == ("cpu", 0)
    text = planned.to_text()
    assert "w4a16 g64 asym by awq, 2 layers, 30 tokens of text" in text
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["time", "RAM", "VRAM", "disk", "files"]
    short = replace(planned, memory_free=1, disk_free=1, finished=1).to_text()
    assert "RAM does not suffice" in short
    assert "the disk does not suffice" in short
    assert "1 layers are finished" in short
    on_gpu = replace(planned, gpu_process=2 << 20, gpu_memory={"layer": 1 << 20}, gpu_memory_free=1 << 30)
    assert on_gpu.gpu_peak == 3 << 20
    line = next(line for line in on_gpu.to_text().splitlines() if "VRAM" in line)
    sizes = {size: format_size(size << 20) for size in (1, 2, 3, 1024)}
    assert line.split(maxsplit=1)[1] == (
        f"{sizes[3]}  of {sizes[1024]} free: {sizes[2]} the process + {sizes[1]} layer"
    )
    assert "VRAM does not suffice" not in on_gpu.to_text()
    assert "VRAM does not suffice" in replace(on_gpu, gpu_memory_free=1 << 20).to_text()
    assert replace(on_gpu, whole=100 << 20).gpu_peak == 102 << 20
    assert not (tmp_path / "out.partial").exists()


def _numbers(checkpoint):
    return sum(torch.Size(checkpoint.header(name)[0]).numel() for name in checkpoint.names())
