"""`qinfer doctor` on the machine that runs the tests."""

import json

import torch

import qinfer as package
from qinfer import backend
from qinfer.kernels import linear_cpu
from qinfer.quant import SCHEMES


def test_doctor_names_versions_machine_and_paths(qinfer, monkeypatch, tmp_path):
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "file").write_bytes(bytes(1000))
    code, out, _ = qinfer("doctor", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["packages"]["torch"] == torch.__version__
    assert document["packages"]["qinfer"]
    assert document["torch"]["threads"] == torch.get_num_threads()
    assert len(document["gpus"]) == torch.cuda.device_count()
    assert 0 < document["cpu"]["memory_available"] <= document["cpu"]["memory_total"]
    assert document["models_run_on"].startswith("cuda" if document["gpus"] else "cpu")
    assert set(document["cpu_paths"]) == set(SCHEMES)
    assert document["cache"] == {"path": str(tmp_path), "num_bytes": 1000, "writable": True}


def test_doctor_says_that_the_cache_cannot_be_written(qinfer, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "file" / "cache"))
    code, out, _ = qinfer("doctor")
    assert code == 0
    assert f"{tmp_path}/file/cache (0 B; it cannot be written: set QINFER_CACHE to a folder that can)" in out


def test_doctor_says_which_products_are_made_in_float32(qinfer, monkeypatch):
    for name in ("has_int8_product", "has_bfloat16_product"):
        monkeypatch.setattr(linear_cpu, name, lambda: False)
    paths = json.loads(qinfer("doctor", "--json").stdout)["cpu_paths"]
    assert "float32: no instructions for int8 here" in paths["w8a8-int8"]
    assert "in float32 for 8 rows of bfloat16 or more" in paths["dense"]
    out = qinfer("doctor").stdout
    assert "op w8a8-int8" in out
    assert package.__version__ in out


def test_doctor_refuses_a_senseless_setting(qinfer, monkeypatch):
    monkeypatch.setenv("QINFER_BACKEND", "cuda")
    backend.settings.cache_clear()
    code, _, err = qinfer("doctor")
    monkeypatch.undo()
    backend.settings.cache_clear()
    assert code == 2
    assert "QINFER_BACKEND must be one of auto, torch, triton, not 'cuda'" in err
