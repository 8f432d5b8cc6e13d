"""The gate tried on purpose: what is sound passes, what is broken fails and is blamed.

All of it goes the way that `qinfer quantize` and `qinfer eval` go, with a quarter of the standard profile's
text and its very limits, on a tiny random model in every run and on the built-in model where minutes are
allowed (`-m slow`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer import jobs
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.compare import WINDOW
from qinfer.evals import clearance, fidelity, text, thresholds
from qinfer.evals.gate import Verdict, decide
from qinfer.evals.store import Store
from qinfer.hub import BUILTIN, resolve
from qinfer.quant import W4A16
from qinfer.quant.rounding import absmax_ranges
from qinfer.reading import Bar, Reader, Serving, open_model, scores_of
from qinfer.testing import tiny_model

TOKENS = 4096
PIECE = 64  # tokens of the pieces that resampled texts are made of


class Subject(NamedTuple):
    """A dense model, the INT8 checkpoint made of it, and the layer that will be damaged."""

    source: str
    layer: int
    int8: jobs.QuantizeResult
    results: Path


@pytest.fixture(
    scope="module", params=["tiny", pytest.param("built-in", marks=pytest.mark.slow)], autouse=True
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Results are kept between the tests, as between commands, in a folder of their own."""
    folder = tmp_path_factory.mktemp("proof")
    source, layer = BUILTIN, 17
    if request.param == "tiny":
        source, layer = str(tiny_model("llama", folder / "tiny", dtype="bfloat16", num_hidden_layers=4)), 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qinfer.env.results_dir", lambda: folder / "results")
        patch.setitem(thresholds.PROFILES, "quarter", thresholds.Profile(TOKENS, 1.0))
        int8 = jobs.quantize(
            source, folder / "int8", scheme="w8a8-int8", method="rtn", profile="quarter", progress=False
        )
        yield Subject(source, layer, int8, folder / "results")


def judge(model: Path | str, subject: Subject) -> jobs.GateResult:
    return jobs.evaluate(str(model), against=subject.source, profile="quarter", progress=False)


def test_the_source_in_bfloat16_passes_against_float32(subject: Subject) -> None:
    result = judge(subject.source, subject)
    assert result.verdict == "PASS", result.to_text()


def test_forty_resampled_texts_raise_at_most_two_alarms(subject: Subject) -> None:
    """Texts drawn piece by piece from what was read, judged like any other."""
    source, store = open_model(subject.source), Store(subject.results)
    length = min(WINDOW, source.checkpoint.config.context_len)
    reference, served = (
        Reader(source, Serving.settle(dtype, "auto", source.checkpoint), length, kept)
        for dtype, kept in (("float32", store), ("bfloat16", None))
    )
    ids = [w.token_ids for w in text.first_tokens(text.reference_windows(source.tokenizer, length), TOKENS)]
    pieces = [
        window._replace(**{name: getattr(window, name)[at : at + PIECE] for name in window._fields[:4]})
        for window in scores_of(reference, served, ids, store, Bar(False))
        for at in range(0, length - PIECE, PIECE)  # the last one has no next token at its end
    ]
    limits = thresholds.limits_for("w16", source.num_parameters, thresholds.PROFILES["standard"])
    draw = torch.Generator().manual_seed(0)
    verdicts = []
    for seed in range(40):
        drawn = [pieces[int(i)] for i in torch.randint(len(pieces), (len(pieces),), generator=draw)]
        measures = fidelity.measures(drawn, limits, seed=seed)
        size = {"num_tokens": PIECE * len(drawn), "num_windows": len(drawn), "wanted": 0}
        verdicts.append(decide(measures, **size)[0])
    assert 40 - verdicts.count(Verdict.PASS) <= 2, verdicts


def test_int8_passes(subject: Subject) -> None:
    result = subject.int8.gate
    assert result is not None
    assert result.verdict == "PASS", result.to_text()
    assert result.blame is None
    assert clearance.require(subject.int8.out).state == "passed"


def test_one_layer_with_shuffled_scales_fails_and_is_blamed(subject: Subject, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(subject.int8.out, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    layer = f"layers.{subject.layer}."
    names = [name for name in tensors if layer in name and name.endswith(".weight_scale")]
    assert len(names) == 7
    draw = torch.Generator().manual_seed(0)
    for name in names:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]), generator=draw)]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    result = judge(damaged, subject)
    assert result.verdict == "FAIL", result.to_text()
    assert result.blame is not None
    assert result.blame.culprit is not None, result.blame.line
    assert result.blame.culprit.name == f"layer {subject.layer}"
    report = (damaged / "qinfer_gate.md").read_text()
    assert f"layer {subject.layer} is to blame" in report


def test_a_damaged_template_fails(subject: Subject, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(subject.int8.out, tmp_path / "damaged"))
    template = damaged / "chat_template.jinja"
    assert "<|im_end|>" in template.read_text()
    template.write_text(template.read_text().replace("<|im_end|>", ""))
    result = judge(damaged, subject)
    assert result.verdict == "FAIL"
    assert "chat template" in result.reasons[0]


def test_four_bits_rounded_per_channel_fail_and_no_layer_is_blamed(subject: Subject, tmp_path: Path) -> None:
    out = tmp_path / "w4"
    options: dict[str, Any] = {"method": "rtn", "group_size": 64, "symmetric": True, "gate": False}
    jobs.quantize(subject.source, out, scheme="w4a16", progress=False, **options)
    dense = open_checkpoint(resolve(subject.source))
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        weight = dense.tensor(f"{module}.weight").float()
        low, high = (bound.expand(-1, weight.shape[1] // 64) for bound in absmax_ranges(weight, 1))
        for suffix, tensor in W4A16(64, True).quantize(weight, (low, high), dtype=torch.bfloat16).items():
            tensors[f"{module}.{suffix}"] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    result = judge(out, subject)
    assert result.verdict == "FAIL", result.to_text()
    assert result.blame is not None
    assert result.blame.culprit is None, result.blame.line
