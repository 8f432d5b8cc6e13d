"""`qinfer inspect` on folders written scheme by scheme; and the ledger's weight sizes against those files."""

import json
from pathlib import Path

import pytest

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import all_modules
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.engine.footprint import WeightFormat, weight_bytes
from qinfer.evals import certificate
from qinfer.evals.hashes import hash_files
from qinfer.quant import W4A16, W8A8Fp8, W8A8Int8, W8A16Int8
from qinfer.testing import tiny_model

FORMATS = [
    (W8A8Int8(), WeightFormat("w8a8-int8"), 8.0),
    (W8A16Int8(), WeightFormat("w8a16-int8"), 8.0),
    (W8A8Fp8(), WeightFormat("w8a8-fp8"), 8.0),
    (W4A16(32, True), WeightFormat("w4a16", 32, True), 4.0),
    (W4A16(32, False), WeightFormat("w4a16", 32, False), 4.0),
]


def rounded(source: Path, out: Path, scheme) -> Path:
    """The source with every linear rounded to nearest in that scheme."""
    checkpoint = open_checkpoint(source)
    writer = CheckpointWriter(checkpoint, out)
    modules = set(all_modules(checkpoint.config))
    for name in sorted(checkpoint.names()):
        module, _, suffix = name.rpartition(".")
        weight = checkpoint.tensor(name)
        if module in modules and suffix == "weight":
            for part, tensor in scheme.quantize(weight, dtype=weight.dtype).items():
                writer.add(f"{module}.{part}", tensor)
        else:
            writer.add(name, weight)
    writer.finish(quantization_config(scheme, ignore=["lm_head"]))
    return out


@pytest.mark.parametrize(("scheme", "weight_format", "bits"), FORMATS)
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_inspect_counts_what_the_writer_wrote_and_the_ledger_planned(
    qinfer, tmp_path, family, scheme, weight_format, bits
):
    source = tiny_model(family, tmp_path / "source", dtype="bfloat16")
    out = rounded(source, tmp_path / "out", scheme)
    code, text, _ = qinfer("inspect", out, "--json")
    assert code == 0
    document = json.loads(text)
    groups = document["groups"]
    assert [row["group"] for row in groups[:-1]] == ["qkv", "o", "gate_up", "down"]
    assert {row["scheme"] for row in groups[:-1]} == {scheme.label}
    assert groups[-1]["scheme"] == "dense"
    config = open_checkpoint(source).config
    assert sum(row["num_bytes"] for row in groups) == weight_bytes(config, weight_format)
    assert all(bits < 8 * row["num_bytes"] / row["num_weights"] < bits * 1.4 for row in groups[:-1])
    assert document["is_quantized"]
    assert document["gate"]["state"] == "refused"
    assert f"qinfer eval {out} --against REF" in document["gate"]["line"]
    assert scheme.label in qinfer("inspect", out).stdout


def test_inspect_of_a_dense_folder(qinfer, tmp_path):
    folder = tiny_model("gemma3", tmp_path / "model", shards=2)
    document = json.loads(qinfer("inspect", folder, "--json").stdout)
    config = open_checkpoint(folder).config
    assert sum(row["num_bytes"] for row in document["groups"]) == weight_bytes(config)
    gate = document["gate"]
    assert (gate["state"], gate["line"]) == ("dense", "dense weights: no verdict needed")
    assert gate["verdict"] is gate["reasons"] is gate["measures"] is None
    assert not document["is_quantized"]


@pytest.mark.parametrize(
    ("verdict", "state"), [("PASS", "passed"), ("FAIL", "refused"), ("UNDECIDED", "refused")]
)
def test_inspect_shows_the_verdict_and_notices_a_stale_one(qinfer, tmp_path, verdict, state):
    out = rounded(tiny_model("llama", tmp_path / "source"), tmp_path / "out", W8A8Int8())
    contents = {
        "verdict": verdict,
        "reasons": ["mean KL 0.01"],
        "settings": {"kv_cache_dtype": "float32"},
        "measures": [],
    }
    certificate.write(out, contents, hash_files(out), "report")
    told = json.loads(qinfer("inspect", out, "--json").stdout)["gate"]
    assert (told["state"], told["verdict"], told["reasons"]) == (state, verdict, ["mean KL 0.01"])
    with (out / "config.json").open("a") as file:
        file.write("\n")
    stale = json.loads(qinfer("inspect", out, "--json").stdout)["gate"]
    assert (stale["state"], stale["verdict"]) == ("refused", verdict)
    assert ("stale" in stale["line"]) == (verdict == "PASS")


def test_inspect_names_what_is_missing(qinfer, tmp_path):
    folder = tiny_model("llama", tmp_path / "model", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    code, out, err = qinfer("inspect", folder)
    assert (code, out) == (2, "")
    assert "model-00002-of-00002.safetensors" in err
    code, _, err = qinfer("inspect", tmp_path / "absent")
    assert code == 2
    assert err.count("\n") == 1
