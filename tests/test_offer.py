"""After a failed verdict: what is offered was tried, by the limits of its own class, on tiny models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer import jobs
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.checkpoint.rounded import RoundedCheckpoint
from qinfer.compare import Comparison
from qinfer.errors import CheckpointError
from qinfer.evals import thresholds
from qinfer.evals.gate import Measure
from qinfer.evals.offer import Offer, Trial
from qinfer.evals.statistics import Interval
from qinfer.offer import LADDER, LENGTH, WINDOWS, find_offer
from qinfer.quant import W4A16, Dense, W8A8Fp8Block, W8A16Fp8
from qinfer.reading import Serving, open_model
from qinfer.testing import tiny_model

TEXT = [[(7 * i + w) % 256 for i in range(LENGTH + w)] for w in range(WINDOWS + 1)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen2", tmp_path_factory.mktemp("offer") / "tiny", dtype="bfloat16")


def quantized(source: Path, scheme: str, **options: object) -> Path:
    out = source.parent / scheme
    if not out.exists():
        jobs.quantize(str(source), out, scheme=scheme, method="rtn", gate=False, progress=False, **options)
    return out


def offer(candidate: Path, source: Path, **serving: str) -> Offer:
    ours, theirs = open_model(str(candidate)), open_model(str(source))
    served = Serving.settle("bfloat16", serving.pop("kv", "auto"), ours.checkpoint, **serving)
    return find_offer(Comparison(ours, served, theirs, "standard"), TEXT)


@pytest.mark.parametrize(
    "scheme",
    [*LADDER, W4A16(32, False), W4A16(64, True), W8A16Fp8(), W8A8Fp8Block()],
    ids=lambda scheme: scheme.label,
)
def test_a_trial_holds_the_numbers_that_quantize_writes(scheme, source: Path, tmp_path: Path) -> None:
    four = {"group_size": scheme.group_size, "symmetric": scheme.symmetric} if scheme.name == "w4a16" else {}
    out = tmp_path / "out"
    jobs.quantize(
        str(source),
        out,
        scheme=scheme.name,
        method="rtn",
        ranges="absmax",
        gate=False,
        progress=False,
        **four,
    )
    written, tried = open_checkpoint(out), RoundedCheckpoint(open_checkpoint(source), scheme)
    for module in all_modules(written.config):
        assert tried.scheme(module) == written.scheme(module)
        ours, theirs = tried.module(module), written.module(module)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert tried.scheme("lm_head") == Dense()


def test_after_4_bits_the_first_of_8_bits_that_passes_is_offered(source: Path) -> None:
    found = offer(quantized(source, "w4a16", group_size=32), source)
    names = [trial.name for trial in found.trials]
    assert names == ["w4a16 g32 asym", *(scheme.label for scheme in LADDER)][: len(names)]
    assert [trial.passes for trial in found.trials] == [False] * (len(names) - 1) + [True]
    assert found.tokens == WINDOWS * LENGTH
    last, limits = found.trials[-1], {m.name: m.limit for m in found.trials[-1].measures}
    kind = thresholds.scheme_class([last.name])
    assert limits["mean KL"] == pytest.approx(thresholds.LIMITS[kind][0].mean_kl)
    assert found.trials[0].kl.limit == pytest.approx(thresholds.LIMITS["w4a16"][0].mean_kl)
    assert found.trials[0].kl.interval.value > 4 * last.kl.interval.value
    assert f"passes is {last.name}" in found.line
    assert last.how == f"qinfer quantize {source} --out DIR --scheme {last.name}"
    assert found.to_dict()["found"] == last.name


def test_damaged_files_are_told_from_a_scheme_that_is_too_coarse(source: Path, tmp_path: Path) -> None:
    out = quantized(source, "w8a16-int8")
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name].flip(0).contiguous()
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in out.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(4096, 1.0))
        result = jobs.evaluate(str(copy), against=str(source), profile="quick", progress=False)
    assert result.verdict == "FAIL"
    assert result.offer is not None
    assert [trial.name for trial in result.offer.trials] == ["w8a16-int8"]
    assert "w8a16-int8 itself passes when made anew" in result.to_text()
    assert "these files are damaged" in (copy / "qinfer_gate.md").read_text()
    assert result.to_dict()["offer"]["how"].endswith("--scheme w8a16-int8")


def test_a_coarse_kv_cache_is_tried_plain_first(source: Path) -> None:
    found = offer(quantized(source, "w8a16-int8"), source, kv="int8")
    assert [trial.name for trial in found.trials] == ["the same files with a plain KV cache and head"]
    assert found.trials[0].how == "serve them with --kv-cache-dtype bfloat16 and without --lm-head-dtype"


def test_a_mixed_candidate_has_no_scheme_of_its_own(source: Path) -> None:
    out = source.parent / "mixed"
    jobs.quantize(
        str(source), out, scheme="w4a16", method="rtn", budget=6.5, gate=False, progress=False, max_seq_len=48
    )
    found = offer(out, source)
    assert found.own is None
    assert found.trials[0].name == LADDER[0].label


def trial(name: str, kl: float, width: float = 0.0, agreement: float = 1.0) -> Trial:
    measures = (
        Measure("mean KL", "nats/token", Interval(kl, kl - width, kl + width), 0.1),
        Measure("top-1 agreement", "", Interval(agreement, 0.0, 1.0), 0.9, "at least"),
    )
    return Trial(name, f"make {name}", measures)


def test_a_trial_passes_by_its_whole_kl_and_the_value_of_the_rest() -> None:
    assert trial("a", 0.09, 0.005).passes
    assert not trial("a", 0.09, 0.02).passes
    assert not trial("a", 0.09, 0.005, agreement=0.89).passes
    assert not trial("a", math.nan).passes


def test_what_is_said_where_nothing_passes() -> None:
    nothing = Offer((trial("a", 0.2), trial("b", 0.15)), 2048, "a")
    assert nothing.found is None
    assert nothing.line.startswith(
        "no scheme of 8 bits passes when rounded to nearest (mean KL a 0.2, b 0.15"
    )
    some = Offer((trial("a", 0.2), trial("b", 0.05)), 2048, "a")
    assert some.line == (
        "the next that passes is b (mean KL 0.05 [0.05, 0.05] on 2048 tokens, at most 0.1): make b; "
        "tried before it: a 0.2"
    )


def test_weights_that_cannot_be_rounded_are_named(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    tiny_model("qwen2", broken, dtype="bfloat16")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        RoundedCheckpoint(open_checkpoint(broken), LADDER[0]).module("model.layers.0.mlp.up_proj")
