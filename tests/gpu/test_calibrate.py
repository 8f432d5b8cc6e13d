"""Calibration on a GPU: against the same on a CPU, from files as from memory, and on after a kill."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qinfer.calibrate import needs, pipeline
from qinfer.calibrate.gptq import gptq
from qinfer.calibrate.gram import Inputs
from qinfer.calibrate.grid import Grid
from qinfer.calibrate.job import QuantizeJob
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.ranges import full_ranges
from qinfer.calibrate.sensitivity import sensitivities
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.quant import W4A16
from qinfer.testing import error_ratio, tiny_model
from qinfer.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

TEXT = [f"The {i}th text says that {i} and {i + 1} are numbers, which is so." for i in range(6)]
GPU = torch.device("cuda")


def _job(source: Path, out: Path, device: str, dtype: torch.dtype | None, **more: Any) -> QuantizeJob:
    settings = {"calibration": TEXT, "max_seq_len": 32, "num_samples": 6, **more}
    job = prepare_job(
        open_checkpoint(source), Tokenizer.load(source), out, Settings(device=device, **settings)
    )
    return replace(job, dtype=dtype)


def _values(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    modules = all_modules(checkpoint.config)
    return {m: checkpoint.scheme(m).dequantize(checkpoint.module(m)) for m in modules}


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors*"))}


@pytest.mark.parametrize(
    ("family", "scheme", "rotate", "bound"),
    [
        ("llama3", "w4a16", False, 1e-2),
        ("gemma2", "w8a8-fp8-static", False, 1e-2),
        ("gemma3", "w8a16-int8", True, 3e-3),
        ("phi3", "w8a16-int8", True, 3e-3),
    ],
)
def test_weights_rounded_to_nearest_are_those_of_the_cpu(
    family: str, scheme: str, rotate: bool, bound: float, tmp_path: Path
) -> None:
    """But for a scale's last bit, as a GPU divides by a constant with its inverse, and codes that then tie.

    Of int8 that is in many rows the lowest code, at -127.5 steps: one of 64 weights, by a 50th of their
    spread. A weight in 4 bits that ties is a 200th of its matrix.
    """
    source = tiny_model(family, tmp_path / "source")
    for device in ("cpu", "cuda"):
        settings = {"scheme": scheme, "method": "rtn", "rotate": rotate}
        pipeline.run(_job(source, tmp_path / device, device, torch.float32, **settings), progress=False)
    ours, theirs = _values(tmp_path / "cuda"), _values(tmp_path / "cpu")
    assert all(error_ratio(ours[name], theirs[name]) < bound for name in theirs)


@pytest.mark.parametrize(
    ("family", "scheme", "method"),
    [
        ("qwen2", "w4a16", "awq"),
        ("mixtral", "w4a16", "gptq"),
        ("gemma2", "w4a16", "gptq"),
        ("llama3", "w4a16", "awq+gptq"),
        ("gemma2", "w8a8-int8", "smoothquant"),
    ],
)
def test_searches_leave_the_errors_that_they_leave_on_the_cpu(
    family: str, scheme: str, method: str, tmp_path: Path
) -> None:
    """Where candidates are alike a GPU may choose another one; what is left of the error is the same."""
    source = tiny_model(family, tmp_path / "source")
    theirs, ours = (
        pipeline.run(
            _job(source, tmp_path / device, device, torch.float32, scheme=scheme, method=method),
            progress=False,
        )
        for device in ("cpu", "cuda")
    )
    for here, there in zip(theirs.layers, ours.layers, strict=True):
        assert there.output_errors.keys() == here.output_errors.keys()
        for group, error in here.output_errors.items():
            assert there.output_errors[group] == pytest.approx(error, rel=0.1)
        assert [s["mapping"] for s in there.scales] == [s["mapping"] for s in here.scales]
        for mine, other in zip(there.scales, here.scales, strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=0.1)


@pytest.mark.parametrize(
    ("family", "scheme", "method"),
    [("llama3", "awq", "awq"), ("mixtral", "w4a16", "gptq"), ("qwen2", "int8", "smoothquant")],
)
def test_stopped_and_from_files_the_bits_are_the_same(
    family: str, scheme: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(family, tmp_path / "source", num_hidden_layers=3, dtype="bfloat16")
    settings = {"scheme": scheme, "method": method}
    pipeline.run(_job(source, tmp_path / "whole", "cuda", None, **settings), progress=False)
    real, calls = pipeline._quantize_layer, []

    def stop(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(needs, "spills", lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_quantize_layer", stop)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(_job(source, tmp_path / "out", "cuda", None, **settings), progress=False)
    report = pipeline.run(_job(source, tmp_path / "out", "cuda", None, **settings), progress=False)
    assert report.resumed == 2
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_moments_are_exact(dtype: torch.dtype) -> None:
    x = (torch.randn(5000, 384, device=GPU) * torch.rand(384, device=GPU) * 10).to(dtype)
    expected = x.double().T @ x.double()
    inputs = Inputs([x[:1000], x[1000:]])
    assert error_ratio(inputs.gram, expected) < 1e-6
    assert torch.equal(inputs.gram, inputs.gram.T)
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def test_gptq_rounds_as_on_the_cpu() -> None:
    x = torch.randn(2000, 512, dtype=torch.float64)
    gram, weight = (x.T @ x).float(), torch.randn(96, 512)
    scheme = W4A16(64)
    grid = Grid.of(scheme, full_ranges(weight, 64, symmetric=False), torch.bfloat16)
    there = gptq(weight.to(GPU), gram.to(GPU), grid.map(lambda t: t.to(GPU)), 64).weight.cpu()
    here = gptq(weight, gram, grid, 64).weight
    errors = [float((((w - weight) @ gram) * (w - weight)).sum()) for w in (here, there)]
    assert errors[1] == pytest.approx(errors[0], rel=0.01)
    assert error_ratio(there, here) < 0.05


@pytest.mark.parametrize("measured", [True, False])
def test_sensitivities_are_those_of_the_cpu(measured: bool, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model("qwen3", tmp_path))
    sequences = [[i * j % 256 for i in range(32)] for j in (3, 5, 7)]
    costs = [
        sensitivities(
            checkpoint,
            sequences,
            W4A16(32),
            storage=torch.float32,
            dtype=torch.float32,
            measured=measured,
            device=device,
            progress=False,
        )
        for device in (torch.device("cpu"), GPU)
    ]
    assert costs[0].keys() == costs[1].keys()
    assert all(costs[1][unit] == pytest.approx(cost, rel=0.02) for unit, cost in costs[0].items())
