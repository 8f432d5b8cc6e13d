"""`qinfer plan` on real shapes: the published sizes, the law of the sum, and what a small budget says."""

import json
import re

import pytest

from qinfer.calibrate.recipe import settle
from qinfer.config import ModelConfig
from qinfer.llm import LLM
from qinfer.quant import SCHEMES
from qinfer.testing import tiny_config, tiny_model

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


@pytest.fixture
def llama(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_plan_of_an_8b_model_in_24_gib(qinfer, llama):
    code, out, _ = qinfer("plan", llama, "--memory", "24GiB", "--max-model-len", 8192, "--json")
    assert code == 0
    document = json.loads(out)
    rows = {(row["scheme"], row["kv_cache_dtype"]): row for row in document["rows"]}
    assert {scheme for scheme, _ in rows} == {
        *(name for name in SCHEMES if name != "w4a16"), "w4a16 g128 asym", "w4a16 g128 sym"
    }  # fmt: skip
    assert {dtype for _, dtype in rows} == {"bfloat16", "int8", "fp8"}
    for row in rows.values():
        parts = sum(row[name] for name in ("weights", "activations", "graphs", "reserve", "kv_pool"))
        assert 24 * 2**30 - row["kv_pool"] // row["pages"] < parts <= 24 * 2**30
        assert row["tokens"] == 64 * row["pages"]
        assert row["sequences"] == row["pages"] // 128
    dense, fp8, w4a16 = (
        rows[key] for key in (("dense", "bfloat16"), ("w8a8-fp8", "fp8"), ("w4a16 g128 asym", "fp8"))
    )
    assert dense["weights"] == 2 * 8_030_261_248
    assert dense["ratio"] == 1.0
    assert dense["activations"] + dense["graphs"] + dense["reserve"] <= 1.5 * 2**30
    # what a card of 24 GiB holds: 63 k tokens in bf16, 232 k and 280 k quantized, or more
    assert dense["tokens"] >= 63_000
    assert fp8["tokens"] >= 232_000
    assert w4a16["tokens"] >= 280_000
    assert fp8["ratio"] == fp8["tokens"] / dense["tokens"] > 3.5


def test_plan_of_a_small_budget_where_the_unquantized_model_barely_fits(qinfer, llama):
    rows = json.loads(qinfer("plan", llama, "--memory", "18GiB", "--json").stdout)["rows"]
    by_name = {(row["scheme"], row["kv_cache_dtype"]): row for row in rows}
    assert by_name["dense", "bfloat16"]["fits"]
    assert by_name["w8a8-fp8", "fp8"]["ratio"] >= 7.5


def test_plan_shortens_steps_where_the_budget_is_small_and_says_so(qinfer, llama):
    def steps(*options):
        rows = json.loads(qinfer("plan", llama, "--memory", "24GiB", *options, "--json").stdout)["rows"]
        return {row["scheme"]: row["max_num_batched_tokens"] for row in rows}

    settled = steps()
    assert settled["dense"] == 1024  # whose graphs a host launches at once
    assert settled["w4a16 g128 asym"] == 1024  # where no weight is unpacked
    assert set(steps("--max-num-batched-tokens", 8192).values()) == {8192}
    assert "a step of" in qinfer("plan", llama, "--memory", "24GiB").stdout
    assert "a step of" not in qinfer("plan", llama, "--memory", "80GiB").stdout


def test_plan_of_a_head_in_int8(qinfer, llama):
    words = ("plan", llama, "--memory", "24GiB", "--scheme", "w8a8-fp8", "--json")
    dense, small = (
        json.loads(qinfer(*words, *more).stdout)["rows"][0]["weights"]
        for more in ((), ("--lm-head-dtype", "int8"))
    )
    assert dense - small == 128256 * (2 * 4096 - 4096 - 2)


def test_plan_says_what_does_not_fit(qinfer, llama):
    code, out, _ = qinfer("plan", llama, "--memory", "12GiB", "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    dense, fp8 = rows[0], next(row for row in rows if row["scheme"] == "w8a8-fp8")
    assert (dense["fits"], dense["tokens"], dense["ratio"]) == (False, None, None)
    assert "14.96 GiB of weights" in dense["reason"]
    assert "budget is 12.00 GiB" in dense["reason"]
    assert fp8["fits"]
    assert fp8["ratio"] is None  # against nothing
    text = qinfer("plan", llama, "--memory", "12GiB").stdout
    assert "does not fit" in text
    assert "w8a8-fp8 + fp8 KV" in text


def test_plan_of_chosen_rows(qinfer, llama):
    out = qinfer(
        "plan", llama, "--scheme", "w4a16", "--kv-cache-dtype", "fp8_e4m3", "--memory", "24GiB", "--json"
    ).stdout
    assert [(row["scheme"], row["kv_cache_dtype"]) for row in json.loads(out)["rows"]] == [
        ("w4a16 g128 asym", "fp8"), ("w4a16 g128 sym", "fp8")
    ]  # fmt: skip
    code, out, err = qinfer("plan", llama, "--scheme", "w2", "--memory", "24GiB")
    assert (code, out) == (2, "")
    assert "--scheme 'w2': choose from int8, fp8, awq, gptq, dense, w8a8-int8" in err
    code, out, err = qinfer("plan", llama, "--kv-cache-dtype", "int4", "--memory", "24GiB")
    assert (code, out) == (2, "")
    assert "--kv-cache-dtype 'int4': choose from auto, bfloat16" in err
    out = qinfer("plan", llama, "--kv-cache-dtype", "auto", "--memory", "24GiB", "--json").stdout
    assert {row["kv_cache_dtype"] for row in json.loads(out)["rows"]} == {"bfloat16"}


@pytest.mark.parametrize(
    ("preset", "label"), [("int8", "w8a8-int8"), ("fp8", "w8a8-fp8"), ("awq", "w4a16 g128 asym")]
)
def test_plan_knows_the_presets_of_quantize(qinfer, llama, preset, label):
    out = qinfer("plan", llama, "--scheme", preset, "--memory", "24GB", "--json").stdout
    document = json.loads(out)
    assert document["budget"] == 24 * 10**9
    assert {row["scheme"] for row in document["rows"]} == {label}
    assert label == settle(ModelConfig.from_dict(LLAMA_8B), preset).scheme.label


@pytest.fixture
def cpu_only(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("cpu_only")
def test_plan_of_a_float32_folder_on_this_machine(qinfer, tmp_path):
    folder = tiny_model("qwen3", tmp_path / "model")
    document = json.loads(qinfer("plan", folder, "--json").stdout)
    assert document["max_model_len"] == 256
    assert document["budget"] is None  # each row has its own
    assert {row["kv_cache_dtype"] for row in document["rows"]} == {"float32", "bfloat16", "int8", "fp8"}
    sizes = {row["scheme"]: row["weights"] for row in document["rows"]}
    files = (folder / "model.safetensors").stat().st_size
    assert 0 < files - sizes["dense"] < 8192  # the file has a header besides
    assert sizes["w4a16 g64 asym"] < sizes["w8a8-int8"] < sizes["dense"] < sizes["w8a8-fp8"]


def test_plan_leaves_out_what_the_widths_do_not_allow(qinfer, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(tiny_config("llama", hidden_size=48, num_attention_heads=4, intermediate_size=80))
    )
    schemes = {row["scheme"] for row in json.loads(qinfer("plan", path, "--json").stdout)["rows"]}
    assert schemes == set(SCHEMES) - {"w4a16"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config.json cannot be read: "),
        ('{"architectures": ["BertModel"]}', "BertModel"),
        (None, " has no config.json; a model's folder has one beside its .safetensors files"),
    ],
)
def test_plan_of_no_config_is_one_line(qinfer, tmp_path, text, said):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    code, out, err = qinfer("plan", path, "--memory", "24GiB")
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("scheme", ["int8", "fp8", "awq"])
@pytest.mark.parametrize(
    "options", [(), ("--memory", "64MiB"), ("--max-num-seqs", "2", "--max-model-len", "33")]
)
def test_plan_on_a_cpu_is_what_serving_does(qinfer, tmp_path, scheme, options):
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    method = ("--method", "rtn", "--no-gate")
    assert qinfer("quantize", source, "--out", tmp_path / "small", "--scheme", scheme, *method).code == 0
    words = ("--scheme", scheme, "--kv-cache-dtype", "auto", "--device", "cpu", "--json")
    (row,) = json.loads(qinfer("plan", source, *words, *options).stdout)["rows"]
    keywords = {name[2:].replace("-", "_"): value for name, value in zip(*[iter(options)] * 2, strict=True)}
    keywords = {name: value if name == "memory" else int(value) for name, value in keywords.items()}
    served = LLM(str(tmp_path / "small"), allow_ungated=True, **keywords).engine.ledger.to_dict()
    rope = served["weights"] - row["weights"]  # frequencies, and norms that are kept wide, are in no file
    assert 4 * 16 // 2 <= rope < 2048
    for name in ("activations", "graphs", "reserve", "max_model_len"):
        assert row[name] == served[name]
    assert (
        row["budget"] - row["weights"] == served["budget"] - served["weights"] + ("memory" in keywords) * rope
    )
    if "memory" in keywords:
        assert 0 <= row["pages"] - served["pages"] <= 1
    else:
        assert (row["pages"], row["sequences"]) == (served["pages"], served["sequences"])


@pytest.mark.usefixtures("cpu_only")
def test_plan_says_which_device_it_is_for(qinfer, llama):
    def first_line(*options):
        return qinfer("plan", llama, *options).stdout.splitlines()[0]

    asked = ("--memory", "24GiB", "--max-model-len", 8192)
    assert first_line(*asked).endswith(
        "planned for a GPU in 24.00 GiB; --device cpu plans this machine's CPU"
    )
    assert first_line(*asked, "--device", "cuda").endswith("planned for a GPU in 24.00 GiB")
    assert "planned for this machine's CPU in 24.00 GiB" in first_line(*asked, "--device", "cpu")
    here = ("--scheme", "int8", "--memory", "900GiB", "--device", "cpu")
    assert "`qinfer serve` would refuse this budget" in first_line(*here)
    small = qinfer("plan", llama, *asked).stdout
    assert "activations + reserve" in small
    for device, said in (("cuda", "--memory 24GiB"), ("tpu", "--device must be one of cpu, cuda, not 'tpu'")):
        code, out, err = qinfer("plan", llama, "--device", device)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_plan_without_a_length_lowers_the_models_context_to_the_pool(qinfer, llama):
    words = ("plan", llama, "--memory", "24GiB", "--scheme", "dense", "--kv-cache-dtype", "bfloat16")
    (row,) = json.loads(qinfer(*words, "--json").stdout)["rows"]
    assert row["max_model_len"] == row["tokens"] < 131_072
    assert row["sequences"] == 1
    text = qinfer(*words).stdout
    assert f"1 of {row['tokens']:,}" in text
    assert "serving lowers max_model_len" in text


def test_plan_of_a_length_that_was_asked_for_and_fits_in_some_rows(qinfer, llama):
    words = ("plan", llama, "--memory", "24GiB", "--max-model-len", 100_000)
    rows = json.loads(qinfer(*words, "--json").stdout)["rows"]
    assert not rows[0]["fits"]
    assert re.search("max_model_len 100000 is more than the 6[0-9]{4} tokens", rows[0]["reason"])
    assert [row["fits"] for row in rows] == [row is not rows[0] for row in rows]
    assert all(row["max_model_len"] == 100_000 for row in rows[1:])


@pytest.mark.parametrize("options", [("5GiB",), ("5GiB", "--json"), ("8GiB", "--max-model-len", 131_072)])
def test_plan_where_nothing_fits_is_one_line(qinfer, llama, options):
    code, out, err = qinfer("plan", llama, "--memory", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "nothing fits on a GPU (--device cpu plans this machine's CPU), not even the smallest " in err
    assert "(w4a16 g128 asym + fp8 KV)" in err


def test_a_budget_without_a_unit_is_asked_for_one(qinfer, llama):
    code, out, err = qinfer("plan", llama, "--memory", "4")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'4' would be 4 bytes: write a unit" in err


def test_m01_a_budget_that_is_no_size(qinfer, llama):
    code, _, err = qinfer("plan", llama, "--memory", "lots")
    assert code == 2
    assert "'lots' is not a size" in err


def test_plan_of_a_hub_model_fetches_nothing_but_its_config(qinfer, monkeypatch, llama):
    asked = {}

    def hf_hub_download(model, filename, **options):
        asked.update(options, model=model, file=filename)
        return str(llama)

    monkeypatch.setattr("qinfer.hub.hf_hub_download", hf_hub_download)
    code, out, _ = qinfer("plan", "org/model", "--revision", "v2", "--memory", "24GiB", "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["weights"] == 2 * 8_030_261_248
    assert (asked["model"], asked["revision"], asked["file"]) == ("org/model", "v2", "config.json")
