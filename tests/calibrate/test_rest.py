"""Where streams wait changes no bit: in memory, in files, and on after a run was stopped."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import needs, pipeline
from qinfer.calibrate.block import embed_batches
from qinfer.calibrate.devices import chosen_device
from qinfer.calibrate.pipeline import STREAMS
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.rest import Made, Rest, made
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.errors import UserError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

CPU = torch.device("cpu")
TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)] + ["Short."]


def _job(source, out, **arguments):
    arguments = {"calibration": TEXT, "max_seq_len": 32, "num_samples": 7, "device": "cpu", **arguments}
    return prepare_job(open_checkpoint(source), Tokenizer.load(source), out, Settings(**arguments))


def _bytes(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors*"))}


@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral"])
@pytest.mark.parametrize(
    ("scheme", "method"), [("awq", "awq+gptq"), ("int8", "smoothquant"), ("w8a8-fp8-static", "rtn")]
)
def test_files_or_memory_the_bits_are_the_same(family, scheme, method, tmp_path, monkeypatch, caplog):
    source = tiny_model(family, tmp_path / "source", dtype="bfloat16")
    settings = {"scheme": scheme, "method": method, "kv_scales": "fp8"}
    whole = pipeline.run(_job(source, tmp_path / "memory", **settings), progress=False)
    monkeypatch.setattr(needs, "spills", lambda *_: True)
    spilled = pipeline.run(_job(source, tmp_path / "files", **settings), progress=False)
    assert "hidden states of " in caplog.text
    assert _bytes(tmp_path / "files") == _bytes(tmp_path / "memory")
    for ours, theirs in zip(spilled.layers, whole.layers, strict=True):
        assert replace(ours, seconds=0) == replace(theirs, seconds=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "memory", "source"]
    assert not list((tmp_path / "files").glob(".*"))


def test_stopped_with_files_it_goes_on_and_tells_its_own_layers(tmp_path, monkeypatch):
    source = tiny_model("llama3", tmp_path / "source", num_hidden_layers=3)
    pipeline.run(_job(source, tmp_path / "whole", scheme="awq"), progress=False)
    monkeypatch.setattr(needs, "spills", lambda *_: True)
    real, layers = pipeline._quantize_layer, []

    def stop(*arguments):
        layers.append(arguments[1])
        if len(layers) == 3:
            assert list((tmp_path / "out.partial" / STREAMS).iterdir())
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_quantize_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(_job(source, tmp_path / "out", scheme="awq"), progress=False)
    assert not (tmp_path / "out.partial" / STREAMS).exists()  # what the journal has suffices
    report = pipeline.run(_job(source, tmp_path / "out", scheme="awq"), progress=False)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")
    assert report.resumed == 2
    assert report.to_text().startswith(
        f"w4a16 g64 asym by awq: 1 layers in {report.seconds:.1f} s, 2 finished"
    )


@pytest.mark.parametrize("in_files", [False, True])
def test_a_stream_waits_unchanged(in_files, tmp_path):
    rest = Rest(CPU, tmp_path / "streams" if in_files else None)
    slot, first, second = rest.slot("one"), torch.randn(5, 8), torch.randn(7, 8).bfloat16()
    slot.put(first)
    before = slot.get()
    slot.save(tmp_path / "kept")
    slot.put(second)
    assert torch.equal(before, first)  # whoever still reads the old one keeps it
    assert torch.equal(slot.get(), second)
    slot.restore(tmp_path / "kept")
    assert torch.equal(slot.get(), first)
    assert rest.keeps is not in_files


def test_what_is_made_is_made_once_or_whenever_it_is_asked_for(tmp_path):
    calls = []

    def make(i):
        calls.append(i)
        return torch.full((1,), float(i))

    kept = made(make, 3, Rest(CPU))
    assert [float(x) for x in [*kept, *kept]] == [0, 1, 2, 0, 1, 2]
    assert calls == [0, 1, 2]
    anew = made(make, 3, Rest(CPU, tmp_path))
    assert isinstance(anew, Made)
    assert (len(anew), [float(x) for x in anew], float(anew[-1]), [float(x) for x in anew[1:]]) == (
        *(3, [0, 1, 2], 2),
        [1, 2],
    )
    assert calls == [0, 1, 2, 0, 1, 2, 2, 1, 2]
    with pytest.raises(IndexError):
        anew[3]


def test_sequences_of_one_length_share_their_rotations(tmp_path):
    checkpoint = open_checkpoint(tiny_model("llama", tmp_path))
    batches = embed_batches(checkpoint, [[1, 2, 3]] * 4, search_tokens=6, device=CPU, dtype=torch.float32)
    assert [(b.num_sequences, b.keep) for b in batches] == [(2, True), (2, False)]
    assert batches[0].rope is batches[1].rope


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1", "cuda:-1", "mps"])
def test_a_device_that_nobody_knows_is_named(name):
    with pytest.raises(UserError, match=f"unknown device '{name}'; choose auto, cpu, cuda or cuda:N"):
        chosen_device(name)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen_device(None) == chosen_device("auto") == chosen_device("cpu") == CPU
    with pytest.raises(UserError, match="there is no cuda: torch sees no GPU"):
        chosen_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    assert chosen_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(UserError, match="there is no cuda:2: torch sees 2 GPUs"):
        chosen_device("cuda:2")


_HOLES = """
import torch
from qinfer.calibrate.devices import give_memory_back

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

def once():
    blocks = [torch.ones(1 << 18) for _ in range(400)]  # 1 MiB each
    kept, full = blocks[::8], resident()
    del blocks
    return kept, full

torch.ones(7 << 20)  # once a block of that size is freed, glibc keeps smaller ones
kept, full = once()
give_memory_back()
print((full - resident()) >> 20)
"""


def test_memory_that_was_freed_goes_back():
    printed = subprocess.run(
        [sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True
    ).stdout
    assert int(printed) > 300
