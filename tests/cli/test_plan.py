"""`qinfer plan` on real shapes: the published sizes, the law of the sum, and what a small budget says."""

import json

import pytest

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
        "dense", "w8a8-int8", "w8a16-int8", "w8a8-fp8", "w4a16 g128 asym", "w4a16 g128 sym"
    }  # fmt: skip
    assert {dtype for _, dtype in rows} == {"bfloat16", "int8", "fp8"}
    for row in rows.values():
        parts = sum(row[name] for name in ("weights", "activations", "graphs", "reserve", "kv_pool"))
        assert 24 * 2**30 - row["kv_pool"] // row["pages"] < parts <= 24 * 2**30
        assert row["tokens"] == 16 * row["pages"]
        assert row["sequences"] == row["tokens"] // 8192
    dense, fp8, w4a16 = (
        rows[key] for key in (("dense", "bfloat16"), ("w8a8-fp8", "fp8"), ("w4a16 g128 asym", "fp8"))
    )
    assert dense["weights"] == 2 * 8_030_261_248
    assert dense["ratio"] == 1.0
    # what a card of 24 GiB holds: 63 k tokens in bf16, 232 k and 280 k quantized, or more
    assert dense["tokens"] >= 63_000
    assert fp8["tokens"] >= 232_000
    assert w4a16["tokens"] >= 280_000
    assert fp8["ratio"] == fp8["tokens"] / dense["tokens"] > 3.5


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
    assert "dense, w8a8-int8" in err


def test_plan_of_a_float32_folder_on_this_machine(qinfer, tmp_path):
    folder = tiny_model("qwen3", tmp_path / "model")
    document = json.loads(qinfer("plan", folder, "--json").stdout)
    assert document["max_model_len"] == 256
    assert document["budget"] > 2**27
    assert {row["kv_cache_dtype"] for row in document["rows"]} == {"float32", "bfloat16", "int8", "fp8"}
    sizes = {row["scheme"]: row["weights"] for row in document["rows"]}
    files = (folder / "model.safetensors").stat().st_size
    assert 0 < files - sizes["dense"] < 8192  # the file has a header besides
    assert sizes["w4a16 g64 asym"] < sizes["w8a8-int8"] < sizes["dense"]


def test_plan_leaves_out_what_the_widths_do_not_allow(qinfer, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(tiny_config("llama", hidden_size=48, num_attention_heads=4, intermediate_size=80))
    )
    schemes = {row["scheme"] for row in json.loads(qinfer("plan", path, "--json").stdout)["rows"]}
    assert schemes == {"dense", "w8a8-int8", "w8a16-int8", "w8a8-fp8"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as a config.json"),
        ('{"architectures": ["BertModel"]}', "BertModel"),
        (None, "No such file"),
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


def test_m01_a_budget_that_is_no_size(qinfer, llama):
    code, _, err = qinfer("plan", llama, "--memory", "lots")
    assert code == 2
    assert "'lots' is not a size" in err


def test_plan_of_a_hub_model_fetches_nothing_but_its_config(qinfer, monkeypatch, llama):
    asked = {}

    def hf_hub_download(model, file, **options):
        asked.update(options, model=model, file=file)
        return str(llama)

    monkeypatch.setattr("qinfer.hub.hf_hub_download", hf_hub_download)
    code, out, _ = qinfer("plan", "org/model", "--revision", "v2", "--memory", "24GiB", "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["weights"] == 2 * 8_030_261_248
    assert (asked["model"], asked["revision"], asked["file"]) == ("org/model", "v2", "config.json")
