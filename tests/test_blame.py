"""Blame is found by putting the candidate's parts into the source one by one, on tiny random models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer import jobs
from qinfer.blame import find_blame
from qinfer.compare import Comparison
from qinfer.evals import thresholds
from qinfer.evals.blame import Blame
from qinfer.reading import Serving, open_model
from qinfer.testing import tiny_model

LAYERS = 6


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def source(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    changes = {"num_hidden_layers": LAYERS}
    if request.param == "gemma3":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return tiny_model(request.param, folder, dtype="bfloat16", **changes)


@pytest.fixture(scope="module")
def quantized(source: Path) -> Path:
    out = source.parent / "w8a16"
    jobs.quantize(str(source), out, scheme="w8a16-int8", gate=False, progress=False)
    return out


@pytest.fixture(scope="module")
def rotated(source: Path) -> Path:
    out = source.parent / "rotated"
    jobs.quantize(str(source), out, scheme="w8a16-int8", rotate=True, gate=False, progress=False)
    return out


def blame(candidate: Path, source: Path, **serving: str) -> Blame:
    ours, theirs = open_model(str(candidate)), open_model(str(source))
    served = Serving.settle("float32", "auto", ours.checkpoint, **serving)
    windows = [[(7 * i + w) % 256 for i in range(80 + w)] for w in range(3)]
    return find_blame(Comparison(ours, served, theirs, "standard"), windows)


def changed(quantized: Path, folder: Path, *names: str) -> Path:
    """A copy of the checkpoint in which the tensors whose names hold one of `names` are shuffled."""
    copy = Path(shutil.copytree(quantized, folder / "changed"))
    tensors = load_file(copy / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    touched = [name for name in tensors if any(part in name for part in names)]
    assert touched
    for name in touched:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]), generator=draw)]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_the_layer_with_shuffled_scales_is_found(
    source: Path, quantized: Path, tmp_path: Path, layer: int
) -> None:
    found = blame(changed(quantized, tmp_path, f"layers.{layer}.mlp.down_proj.weight_scale"), source)
    assert found.culprit is not None, found
    assert found.culprit.name == f"layer {layer}"
    errors = {part.name: part.error for part in found.parts}
    assert max(errors, key=lambda name: errors[name]) == f"layer {layer}"
    assert found.tokens == 3 * 80


def test_a_damaged_end_is_found(source: Path, quantized: Path, tmp_path: Path) -> None:
    embedding, head = ends(source)
    for name, part in (("model.norm.weight", head), ("embed_tokens.weight", embedding)):
        found = blame(changed(quantized, tmp_path / part / name, name), source)
        assert found.culprit is not None, found
        assert found.culprit.name == part


def ends(source: Path) -> tuple[str, str]:
    """What the two ends of the model are called: one part where they share a matrix."""
    tied = open_model(str(source)).checkpoint.config.tie_word_embeddings
    return ("embedding and head",) * 2 if tied else ("embedding", "head")


def test_a_sound_candidate_has_no_culprit(source: Path, quantized: Path) -> None:
    found = blame(quantized, source)
    assert found.culprit is None, found.line
    embedding, head = ends(source)
    names = [embedding, *(f"layer {i}" for i in range(LAYERS)), *([head] if head != embedding else [])]
    assert [part.name for part in found.parts] == names
    assert all(part.error < 0.05 for part in found.parts)
    same = blame(source, source)
    assert (same.total, {part.error for part in same.parts}) == (0.0, {0.0})
    assert same.culprit is None


def test_a_rotated_candidate_is_compared_in_the_sources_basis(source: Path, rotated: Path) -> None:
    found = blame(rotated, source)
    assert all(part.error < 0.05 for part in found.parts), found.parts
    assert found.total < 0.01
    # a rotation unties the head of a model that has one matrix for both ends, where it can be turned at all
    config = open_model(str(rotated)).checkpoint.config
    assert (found.parts[0].name == "embedding") == (not config.tie_word_embeddings)


@pytest.mark.parametrize("part", ["layers.3.mlp.down_proj.weight_scale", "embed_tokens.weight"])
def test_what_is_damaged_in_a_rotated_candidate_is_found(
    source: Path, rotated: Path, tmp_path: Path, part: str
) -> None:
    """A shuffled embedding shows no basis any more; the head does."""
    found = blame(changed(rotated, tmp_path, part), source)
    assert found.culprit is not None, found
    assert found.culprit.name == ("layer 3" if "layers" in part else ends(rotated)[0])


def test_a_failed_verdict_names_the_layer(source: Path, quantized: Path, tmp_path: Path) -> None:
    copy = changed(quantized, tmp_path, "layers.2.mlp.down_proj.weight_scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 1.0))
        result = jobs.evaluate(str(copy), against=str(source), profile="quick", progress=False)
    assert result.verdict == "FAIL"
    assert "layer 2 is to blame" in result.to_text()
    assert result.to_dict()["blame"]["culprit"] == "layer 2"
