"""How much memory reading a checkpoint takes: one shard is mapped at a time, whatever their number."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.checkpoint import checkpoint as module
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.errors import CheckpointError
from qinfer.model.decoder import load_decoder
from qinfer.testing import tiny_model


@pytest.fixture
def folder(tmp_path):
    return tiny_model("llama3", tmp_path / "model", shards=4)


def mapped(folder):
    """Weight files that lie in this process's address space."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return {line.split("/")[-1].strip() for line in maps if str(folder) in line}


def test_one_shard_is_mapped_at_a_time(folder, monkeypatch):
    seen: list[set[str]] = []
    read = Checkpoint.tensor

    def watched(self, name, device=module.CPU):
        copy = read(self, name, device).clone()  # what a GPU has: nothing of the file
        seen.append(mapped(folder))
        return copy

    monkeypatch.setattr(Checkpoint, "tensor", watched)
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.weight_files) == 4
    decoder = load_decoder(checkpoint, dtype=torch.bfloat16)
    assert set().union(*seen) == {file.name for file in checkpoint.weight_files}
    assert max(map(len, seen)) == 1
    del checkpoint
    gc.collect()
    assert not mapped(folder)  # and none once the model is loaded
    assert decoder.layers


def test_any_order_reads_the_same(folder):
    checkpoint = open_checkpoint(folder)
    names = sorted(checkpoint.names())
    forward = {name: checkpoint.tensor(name).clone() for name in names}
    for name in reversed(names):
        assert torch.equal(checkpoint.tensor(name), forward[name])


def test_tensors_arrive_on_the_device_that_is_asked_for(folder, monkeypatch):
    asked: list[torch.device] = []
    read = Checkpoint.tensor

    def watched(self, name, device=module.CPU):
        asked.append(device)
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", watched)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(RuntimeError):
        load_decoder(checkpoint, device=torch.device("meta"))  # no data: the check for NaN cannot pass
    assert asked == [torch.device("meta")] * len(asked)
    assert asked


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_q01_weight_that_float16_cannot_hold_is_named(name: str, tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = 1e5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} holds 9.984e\+04, which float16 cannot"):
        load_decoder(open_checkpoint(folder), dtype=torch.float16)
    assert load_decoder(open_checkpoint(folder)).dtype == torch.bfloat16
