"""Quantize, judge, certify, on tiny random models: what is written, what is refused, what passes."""

from __future__ import annotations

import gc
import json
import math
import shlex
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qinfer import jobs, judging
from qinfer.cli import main
from qinfer.errors import CheckpointError, GateError, UserError
from qinfer.evals import certificate, clearance, thresholds
from qinfer.llm import LLM
from qinfer.model.decoder import Decoder
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model


@pytest.fixture(scope="module", autouse=True)
def quick_profile() -> Iterator[None]:
    """A profile with an eighth of the text, so that a judgement takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(thresholds.PROFILES, "quick", thresholds.Profile(2048, 1.0))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def quantized(source: Path) -> jobs.QuantizeResult:
    return jobs.quantize(
        str(source), source.parent / "w8a16", scheme="w8a16-int8", profile="quick", progress=False
    )


@pytest.fixture
def copy(quantized: jobs.QuantizeResult, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized.out, tmp_path / "copy"))


def judge(model: Path, against: Path, **options: object) -> jobs.GateResult:
    settled = {"profile": "quick", "progress": False, **options}
    return jobs.evaluate(str(model), against=str(against), **settled)


def values(result: jobs.GateResult) -> dict[str, float]:
    return {measure.name: measure.interval.value for measure in result.measures}


def test_dense_against_itself_is_at_zero_and_gets_no_certificate(source: Path) -> None:
    result = judge(source, source, dtype="float32")
    assert result.verdict == "PASS"
    found = values(result)
    assert found["mean KL"] == found["p99 KL"] == 0.0
    assert found["top-1 agreement"] == found["perplexity ratio"] == 1.0
    assert not (source / certificate.CERTIFICATE_NAME).exists()


def test_the_serving_dtype_counts_and_its_share_is_reported(source: Path) -> None:
    found = values(judge(source, source))
    assert 0 < found["mean KL"] < 1e-3
    assert found["noise floor: mean KL"] == pytest.approx(found["mean KL"], rel=0.2)


def test_quantize_writes_a_certificate_that_lets_it_be_served(quantized: jobs.QuantizeResult) -> None:
    assert quantized.gate is not None
    assert quantized.gate.verdict == "PASS", quantized.to_text()
    status = clearance.require(quantized.out)
    assert status.state == "passed"
    document = json.loads((quantized.out / "qinfer_gate.json").read_text())
    assert document["verdict"] == "PASS"
    assert document["settings"]["schemes"] == ["w8a16-int8"]
    assert document["settings"]["tokens"] == 2048
    assert document["settings"]["kv_cache_dtype"] == "bfloat16"
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(
        document["hashes"]
    )
    assert len(document["settings"]["data_sha256"]) == 64
    assert set(document["settings"]["windows"]) == {"raw", "chat"}
    text = (quantized.out / "qinfer_gate.md").read_text()
    assert text.startswith("# PASS")
    assert "| mean KL |" in text
    assert json.loads(json.dumps(quantized.to_dict()))["gate"]["verdict"] == "PASS"


def test_the_recorded_command_gives_the_same_numbers(
    quantized: jobs.QuantizeResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantized.gate is not None
    program, *arguments = shlex.split(quantized.gate.settings["command"])
    assert program == "qinfer"
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--json"])
    assert left.value.code == 0
    assert json.loads(capsys.readouterr().out)["measures"] == quantized.gate.to_dict()["measures"]


def test_nothing_of_the_models_stays_in_memory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Decoder]] = []

    def remember(decoder: Decoder, *args: object, **kwargs: object) -> None:
        made.append(weakref.ref(decoder))
        original(decoder, *args, **kwargs)

    original = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", remember)
    jobs.quantize(str(source), tmp_path / "out", scheme="w8a16-int8", profile="quick", progress=False)
    gc.collect()
    assert len(made) >= 2
    assert not [decoder for decoder in made if decoder() is not None]


def test_m07_rounds_of_quantizing_and_serving_leave_nothing(source: Path, tmp_path: Path) -> None:
    left = []
    for i in range(5):
        out = tmp_path / str(i)
        jobs.quantize(str(source), out, scheme="w8a8-int8", gate=False, progress=False)
        llm = LLM(str(out), allow_ungated=True, num_kv_blocks=8)
        llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        del llm
        gc.collect()
        left.append(sum(x.nbytes for x in gc.get_objects() if issubclass(type(x), torch.Tensor)))
    assert left[1:] == [left[1]] * 4  # the first round may leave what is made once


def test_four_bits_per_channel_fail_and_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "w4"
    result = jobs.quantize(str(source), out, scheme="w4a16", method="rtn", profile="quick", progress=False)
    assert result.gate is not None
    assert result.gate.verdict == "FAIL"
    with pytest.raises(GateError, match=r"is FAIL .*; what passes in its place: qinfer quantize"):
        clearance.require(out)
    assert clearance.require(out, allow_ungated=True).state == "failed"


def test_activations_in_float16_are_not_what_was_measured(quantized: jobs.QuantizeResult) -> None:
    """Whatever the KV cache holds: what overflows is the stream."""
    for kv_cache_dtype in ("auto", "float32"):
        with pytest.raises(GateError, match="with activations in bfloat16 and does not cover float16") as no:
            LLM(str(quantized.out), dtype="float16", kv_cache_dtype=kv_cache_dtype, num_kv_blocks=8)
        assert "--dtype float16" in str(no.value)
    served = LLM(str(quantized.out), dtype="float32", kv_cache_dtype="bfloat16", num_kv_blocks=8)
    assert served.gate.state == "passed"


def test_without_a_gate_there_is_no_verdict(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "ungated"
    result = jobs.quantize(str(source), out, scheme="w8a8-fp8", gate=False, progress=False)
    assert result.gate is None
    assert "not judged" in result.to_text()
    with pytest.raises(GateError, match="has no verdict"):
        clearance.require(out)


def test_damaged_weights_fail(copy: Path, source: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    tensors[name] = (
        tensors[name][torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(0))] * 40
    )
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GateError, match="stale"):
        clearance.require(copy)
    assert judge(copy, source).verdict == "FAIL"
    with pytest.raises(GateError, match=r"verdict on .* is FAIL"):
        clearance.require(copy)


def test_e10_one_nan_weight_is_a_named_error(copy: Path, source: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        judge(copy, source)


def test_a_damaged_template_fails_without_measuring(copy: Path, source: Path) -> None:
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_start|>"))
    result = judge(copy, source)
    assert result.verdict == "FAIL"
    assert result.measures == ()
    assert "chat template" in result.reasons[0]


def test_too_short_a_text_is_undecided_and_refused(
    copy: Path, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert judge(copy, source).verdict == "PASS"
    short = tmp_path / "short.txt"
    short.write_text("A sentence of a few words. " * 20)
    assert "takes the place" not in caplog.text
    result = judge(copy, source, text_file=short)
    assert result.verdict == "UNDECIDED"
    assert f"UNDECIDED takes the place of the PASS of {copy}" in caplog.text
    caplog.clear()
    assert "give a longer text" in result.reasons[-1]
    with pytest.raises(GateError, match="UNDECIDED"):
        clearance.require(copy)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert judge(copy, source, text_file=empty).verdict == "UNDECIDED"
    assert "takes the place" not in caplog.text


def test_k11_the_kv_cache_is_part_of_what_is_measured(copy: Path, source: Path) -> None:
    plain, coarse = values(judge(copy, source)), judge(copy, source, kv_cache_dtype="fp8")
    assert values(coarse)["mean KL"] > plain["mean KL"]
    assert coarse.settings["kv_cache_dtype"] == "fp8"


def test_an_int8_head_is_part_of_what_is_measured(copy: Path, source: Path) -> None:
    plain, coarse = values(judge(copy, source)), judge(copy, source, lm_head_dtype="int8")
    assert plain["mean KL"] < values(coarse)["mean KL"] < plain["mean KL"] + 1e-3
    assert coarse.settings["lm_head_dtype"] == "int8"
    assert coarse.settings["command"].endswith("--lm-head-dtype int8")


def test_what_cannot_be_compared_is_refused(
    quantized: jobs.QuantizeResult, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is quantized itself"):
        judge(quantized.out, quantized.out)
    other = tiny_model("llama", tmp_path / "other", dtype="bfloat16", vocab_size=400)
    with pytest.raises(UserError, match="has a vocabulary of 400"):
        judge(quantized.out, other)
    with pytest.raises(UserError, match="unknown profile 'loose'"):
        judge(source, source, profile="loose")
    with pytest.raises(UserError, match=r"dtype must be auto or one of .*, not 'int8'"):
        judge(source, source, dtype="int8")
    with pytest.raises(UserError, match="unknown kv_cache_dtype 'int4'"):
        judge(source, source, kv_cache_dtype="int4")
    with pytest.raises(UserError, match="cannot be read"):
        judge(source, source, text_file=tmp_path / "missing.txt")


def test_e07_e08_score_text_equals_transformers(source: Path, tmp_path: Path) -> None:
    text = "It was a bright cold day, and the clocks were striking. Naïve café, zwölf.\n" * 9
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    score = judging.score_text(str(source), file, window=64, windows=9, dtype="float32", progress=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = jobs.reading.open_model(str(source)).tokenizer.encode(text, add_special_tokens=False)
    nll, tokens = 0.0, 0
    for start in range(0, 9 * 64, 64):
        window = torch.tensor([ids[start : start + 64]])
        with torch.inference_mode():
            logits = model(window).logits[0, :-1].double()
        nll += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
        tokens += 63
    assert score.per_token.value == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert (score.per_token.unit, score.per_token.units) == ("token", tokens)
    assert score.per_byte.bits == pytest.approx(nll / (score.per_byte.units * math.log(2)), rel=1e-5)
    assert score.to_dict()["settings"]["window"] == 64
    assert "per token" in score.to_text()


def test_score_text_refuses_what_cannot_be_scored(source: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(UserError, match="no text to score"):
        judging.score_text(str(source), empty, progress=False)
    with pytest.raises(UserError, match="window is 1"):
        judging.score_text(str(source), empty, window=1, progress=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"out": ""}, "out must name a folder to write, not ''"),
        ({"out": None}, "out must name a folder to write, not None"),
        ({"model": None}, "model must be a name, not None"),
        ({"gate": "no"}, "gate must be True or False, not 'no'"),
        ({"overwrite": "no"}, "overwrite must be True or False, not 'no'"),
        ({"symmetric": "no"}, "symmetric must be True or False, not 'no'"),
        ({"group_size": 64.0}, "group_size must be a whole number of at least 1, not 64.0"),
        ({"num_samples": "a"}, "num_samples must be a whole number of at least 1, not 'a'"),
        ({"max_seq_len": 0}, "max_seq_len must be a whole number of at least 1, not 0"),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
    ],
)
def test_values_of_the_wrong_kind_are_one_line_before_anything_is_made(
    source: Path, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        jobs.quantize(**{"model": str(source), "out": tmp_path / "a" / "out", **options})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
