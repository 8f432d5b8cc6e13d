"""Rotated models are the same functions, for every family, and their outliers are gone."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.calibrate import pipeline
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.rotations import RotatedCheckpoint, rotation
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.testing import FAMILIES, error_ratio, tiny_model
from qinfer.tokenizer import Tokenizer

TEXT = [f"Text {i} is what the statistics come from, as they say." for i in range(6)]
SANDWICH = ("gemma2", "gemma3")


def _shake(folder):
    """Gains, biases and a few channels of the stream that are far from one, zero and the rest."""
    torch.manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor += 0.3 * torch.randn_like(tensor)
        elif name.endswith(".bias"):
            tensor += torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _logits(checkpoint):
    model = load_decoder(checkpoint, dtype=torch.float32)
    ids = torch.arange(5, 45)
    with torch.inference_mode():
        return model.logits(model.forward(ids, torch.arange(40), CausalAttention(1)))


@pytest.mark.parametrize("width", [64, 48, 16])
def test_rotations_are_orthogonal_and_repeatable(width):
    r = rotation(width, 7).double()
    assert (r @ r.T - torch.eye(width)).abs().max() < 1e-6
    assert torch.equal(rotation(width, 7), rotation(width, 7))
    assert not torch.equal(rotation(width, 7), rotation(width, 8))
    if width & (width - 1) == 0:
        assert r.abs().flatten().tolist() == pytest.approx([width**-0.5] * width**2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_function_stays_the_same(family, tied, tmp_path):
    path = tiny_model(family, tmp_path / "source", tie_word_embeddings=tied)
    _shake(path)
    source = open_checkpoint(path)
    rotated = RotatedCheckpoint(source, seed=1)
    before, after = _logits(source), _logits(rotated)
    assert (after - before).abs().max() < 1e-4 * max(1.0, float(before.abs().max()))
    module = "layers.0.self_attn.o_proj.weight"
    name = source.config.tensor_prefix + module
    assert error_ratio(rotated.tensor(name), source.tensor(name)) > 0.5  # it is another matrix
    assert rotated.unties == (tied and family not in SANDWICH)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3"])
@pytest.mark.parametrize("scheme", ["int8", "awq"])
def test_a_rotated_checkpoint_is_written_whole_and_close(family, scheme, tmp_path):
    path = tiny_model(family, tmp_path / "source", tie_word_embeddings=True)
    job = prepare_job(
        open_checkpoint(path),
        Tokenizer.load(path),
        tmp_path / "out",
        Settings(scheme=scheme, rotate=True, calibration=TEXT, max_seq_len=32),
    )
    report = pipeline.run(replace(job, dtype=torch.float32), progress=False)
    result = open_checkpoint(tmp_path / "out")
    assert result.config.tie_word_embeddings == (family in SANDWICH)
    assert error_ratio(_logits(result), _logits(open_checkpoint(path))) < (0.06 if scheme == "int8" else 0.35)
    assert any("rotated" in note for note in report.notes)


def test_outliers_of_the_stream_cost_8_bit_activations_less(tmp_path):
    path = tiny_model("smollm2", tmp_path / "source")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, [5, 40]] *= 60
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    source, errors = open_checkpoint(path), {}
    for rotate in (True, False):
        out = tmp_path / str(rotate)
        job = prepare_job(
            source, Tokenizer.load(path), out, Settings(scheme="w8a8-int8", method="rtn", rotate=rotate)
        )
        pipeline.run(job, progress=False)
        errors[rotate] = error_ratio(_logits(open_checkpoint(out)), _logits(source))
    assert math.isfinite(errors[True])
    assert errors[True] < 0.6 * errors[False]
