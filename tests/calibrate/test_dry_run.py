"""What a run is planned to take, against what it takes."""

import json
from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import dry_run, needs, pace, pipeline
from qinfer.calibrate.recipe import settle
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.dummy import open_dummy
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.testing import tiny_config, tiny_model
from qinfer.tokenizer import Tokenizer

TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen2"])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "awq", "w8a16-int8", "w8a8-fp8-block"])
def test_disk_is_what_is_written(family, scheme, tmp_path):
    source = open_checkpoint(tiny_model(family, tmp_path / "source", dtype="bfloat16"))
    planned = dry_run.plan(source, tmp_path / "out", scheme=scheme, method="rtn")
    job = pipeline.prepare(source, Tokenizer.load(source.path), tmp_path / "out", scheme=scheme, method="rtn")
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


def _work(config, scheme, tokens):
    return needs.Work(config, settle(config, scheme), tokens, 512, 2048, 2)


def test_time_counts_what_methods_do():
    config = ModelConfig.from_dict(tiny_config("llama"))
    efforts = {m: pace.effort(_work(config, m, 8192)) for m in ("int8", "awq", "gptq")}
    rtn = pace.effort(_work(config, "fp8", 0))
    assert rtn.products == rtn.float32 == 0
    assert efforts["awq"].products > efforts["int8"].products > efforts["gptq"].products / 2
    assert efforts["gptq"].float32 > efforts["int8"].float32 == 0
    assert all(effort.passes > rtn.passes for effort in efforts.values())
    speed = pace.Pace(10.0, 20.0, 30.0)
    assert pace.Effort(100.0, 100.0, 90.0).seconds(speed) == 18.0


def test_pace_is_measured(monkeypatch):
    measured = pace.measured_pace(torch.float32)
    assert all(speed > 0 for speed in measured)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "nf4"}, "unknown scheme"),
        ({"scheme": "awq", "method": "smoothquant"}, "smoothquant moves outliers"),
        ({"scheme": "int8"}, "is not empty"),
    ],
)
def test_refuses_what_the_run_refuses(settings, message, tmp_path):
    source = open_checkpoint(tiny_model("llama", tmp_path / "source"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    with pytest.raises(UserError, match=message):
        dry_run.plan(source, tmp_path / "out", **settings)


def test_a_configuration_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    settings = {"scheme": "awq", "num_samples": 3, "max_seq_len": 10}
    planned = dry_run.plan(open_dummy(tmp_path), tmp_path / "out", calibration="text.txt", **settings)
    assert planned.tokens == 30
    assert "writes some of the text itself" not in planned.to_text()
    itself = dry_run.plan(open_dummy(tmp_path), tmp_path / "out", **settings)
    assert "the model writes some of the text itself" in itself.to_text()
    assert replace(itself, source_bytes=10**12).peak == itself.process + 10**12
    assert planned.peak == planned.process + sum(planned.memory.values())
    text = planned.to_text()
    assert "w4a16 g64 asym by awq, 2 layers, 30 tokens of text" in text
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["time", "RAM", "VRAM", "disk", "files"]
    short = replace(planned, memory_free=1, disk_free=1, finished=1).to_text()
    assert "RAM does not suffice" in short
    assert "the disk does not suffice" in short
    assert "1 layers are finished" in short
    assert not (tmp_path / "out.partial").exists()
