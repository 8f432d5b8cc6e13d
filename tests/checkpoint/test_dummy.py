"""Random weights of a configuration: what the loader gets is what a file would hold, in every scheme."""

import json
from pathlib import Path

import pytest
import torch

from qinfer import LLM, SamplingParams
from qinfer.checkpoint import dummy
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.dummy import open_dummy
from qinfer.checkpoint.names import layer_modules, linear_shape
from qinfer.errors import CheckpointError, GateError, UserError
from qinfer.quant import SCHEMES, W4A16, scheme_by_name
from qinfer.testing import FAMILIES, tiny_config, tiny_model

PREFIX = "model.layers.1."


def config_alone(folder: Path, family: str = "llama3", **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **changes)))
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("panel", [1 << 24, 1000])
def test_file_tensors_are_those_of_the_scheme(tmp_path, monkeypatch, scheme, panel):
    monkeypatch.setattr(dummy, "PANEL", panel)  # 1000: several panels, joined
    checkpoint = open_dummy(config_alone(tmp_path, dtype="bfloat16"), scheme, seed=3)
    for module in layer_modules(checkpoint.config):
        shape = linear_shape(checkpoint.config, module)
        settled = checkpoint.scheme(PREFIX + module)
        tensors = checkpoint.module(PREFIX + module)
        assert tensors.keys() == settled.specs(*shape).keys()
        for suffix, spec in settled.specs(*shape).items():
            assert tensors[suffix].shape == spec.shape
            assert tensors[suffix].dtype == spec.dtype or spec.dtype is None
        weight = settled.dequantize(tensors)
        assert weight.std().item() == pytest.approx(shape[1] ** -0.5, rel=0.1)
        assert len({tuple(row) for row in weight.tolist()}) == shape[0]  # no two rows alike


def test_a_seed_gives_the_same_weights_in_any_order(tmp_path):
    folder = config_alone(tmp_path)
    first, second = open_dummy(folder, "w4a16", seed=1), open_dummy(folder, "w4a16", seed=1)
    names = [PREFIX + module for module in layer_modules(first.config)]
    found = {name: first.module(name)["weight_packed"] for name in names}
    assert all(torch.equal(second.module(name)["weight_packed"], found[name]) for name in reversed(names))
    other = open_dummy(folder, "w4a16", seed=2).module(names[0])["weight_packed"]
    assert not torch.equal(found[names[0]], other)
    assert not torch.equal(found[names[1]], found[names[2]])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_speaks_finite_numbers(tmp_path, family):
    llm = LLM(config_alone(tmp_path, family), load_format="dummy", allow_ungated=True, num_kv_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    (answer,) = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs
    assert answer.finish_reason == "length"  # NaN would end it as an error
    assert -100 < answer.cumulative_logprob < 0
    assert answer.text == ""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_speaks_finite_numbers(tmp_path, scheme):
    folder = config_alone(tmp_path, dtype="bfloat16", hidden_size=128, intermediate_size=256)
    llm = LLM(folder, load_format="dummy", scheme=scheme, allow_ungated=True, num_kv_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    (answer,) = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 4)
    assert -100 < answer.cumulative_logprob < 0
    label = "bfloat16" if scheme == "dense" else scheme
    assert llm.engine.ledger.label.split()[0] == label


def test_its_size_is_that_of_the_files_it_stands_for(tmp_path):
    folder = tiny_model("qwen2", tmp_path / "model")
    real, pretended = open_checkpoint(folder), open_dummy(folder)
    assert pretended.names() == real.names()
    sizes = [real.tensor(name).numel() * 4 for name in real.names()]
    assert pretended.num_bytes == sum(sizes)


def test_a_group_size_that_does_not_divide_is_lowered(tmp_path):
    folder = config_alone(tmp_path, hidden_size=64, intermediate_size=96)
    checkpoint = open_dummy(folder, "w4a16", group_size=64, symmetric=True)
    assert checkpoint.scheme(PREFIX + "mlp.down_proj") == W4A16(32, True)


def test_a_quantized_config_needs_no_scheme(tmp_path):
    scheme = scheme_by_name("w8a8-int8")
    folder = config_alone(tmp_path, quantization_config=quantization_config(scheme, ignore=["lm_head"]))
    assert open_dummy(folder).scheme(PREFIX + "mlp.down_proj") == scheme
    assert not open_dummy(folder, "dense").is_quantized


def test_dummy_weights_are_not_served_unasked(tmp_path):
    folder = config_alone(tmp_path)
    with pytest.raises(GateError, match="random numbers"):
        LLM(folder, load_format="dummy")
    assert LLM(folder, load_format="dummy", allow_ungated=True, num_kv_blocks=16).gate.state == "ungated"


def test_of_a_model_on_the_hub_the_config_is_enough(tmp_path, monkeypatch):
    file = config_alone(tmp_path) / "config.json"
    monkeypatch.setattr("qinfer.source.hub.config_file", lambda model, **_: file)
    monkeypatch.delattr("qinfer.source.hub.resolve")  # which would fetch the weights
    llm = LLM("some/model", load_format="dummy", scheme="w8a8-int8", allow_ungated=True, num_kv_blocks=16)
    assert (llm.path, llm.served_model_names) == (tmp_path, ("some/model",))
    assert llm.engine.ledger.label == "w8a8-int8"


def test_a_tokenizer_is_taken_where_there_is_one(tmp_path):
    folder = tiny_model("llama3", tmp_path / "model")
    options = {"load_format": "dummy", "allow_ungated": True, "num_kv_blocks": 16}
    llm = LLM(folder, **options)
    assert llm.generate("hello", SamplingParams(max_tokens=4), use_tqdm=False)[0].prompt == "hello"
    alone = LLM(config_alone(tmp_path / "alone"), **options)
    with pytest.raises(UserError, match="no tokenizer"):
        alone.generate("hello", use_tqdm=False)
    lent = LLM(config_alone(tmp_path / "alone"), tokenizer=str(folder), **options)
    assert lent.get_tokenizer().encode("hello") == llm.get_tokenizer().encode("hello")


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"scheme": "int9"}, "dense, w8a8-int8"),
        ({"scheme": "w8a8-fp8", "group_size": 64}, "no group_size"),
        ({"scheme": "w4a16", "group_size": 48}, "128, 64 or 32"),
        ({"load_format": "auto", "scheme": "w4a16"}, "load_format='dummy'"),
        ({"load_format": "safetensors"}, "has no weights"),
        ({"load_format": "pt"}, "auto, safetensors, dummy"),
    ],
)
def test_mistakes_are_named(tmp_path, keywords, said):
    with pytest.raises(UserError, match=said):
        LLM(config_alone(tmp_path), **{"load_format": "dummy", "allow_ungated": True, **keywords})


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        LLM(tmp_path, load_format="dummy", allow_ungated=True)
