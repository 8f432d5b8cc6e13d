"""A GGUF file's linears rounded anew: 4-bit blocks keep their numbers, others come within half a percent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.gguf_convert import convert_gguf
from qinfer.checkpoint.gguf_requantize import Requantized, requantize
from qinfer.checkpoint.names import all_modules
from qinfer.cli import app, main
from qinfer.errors import UserError
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import W4A16, quantize_named
from qinfer.testing import error_ratio, tiny_model

WriteGGUF = Callable[..., Path]


def again(file: Path, folder: Path) -> tuple[Checkpoint, Checkpoint, Requantized]:
    """The file dequantized, the file rounded anew, and what is said of it."""
    dense = folder / "dense"
    dense.mkdir()
    convert_gguf(file, dense, progress=lambda text: None)
    done = requantize(file, open_checkpoint(dense), folder / "out")
    return open_checkpoint(dense), open_checkpoint(folder / "out"), done


def weights(result: Checkpoint, module: str) -> torch.Tensor:
    return result.scheme(module).dequantize(result.module(module))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3"])
def test_4_bit_blocks_keep_their_numbers(family: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    source = tiny_model(family, tmp_path / "source")
    dense, result, done = again(write_gguf(family, source, kind="Q4_0"), tmp_path)
    original = load_file(source / "model.safetensors")
    for module in all_modules(result.config):
        assert result.scheme(module).label == "w4a16 g32 asym"
        block = torch.tensor(_q4_0(original[f"{module}.weight"].numpy()))
        assert ((weights(result, module) - block).abs() <= block.abs() * 2**-8).all()  # the scale's rounding
        assert set(result.module(module)["weight_zero_point"].unique().tolist()) != {0}  # both signs of d
    assert list(done.linears) == ["Q4_0 as w4a16 g32 asym"]
    assert done.errors["Q4_0 as w4a16 g32 asym"] < 2**-8
    assert error_ratio(_logits(result), _logits(dense)) < 0.02
    kept = set(dense.names()) - {f"{module}.weight" for module in all_modules(result.config)}
    assert all(torch.equal(dense.tensor(name), result.tensor(name)) for name in kept)


def _q4_0(values: np.ndarray) -> np.ndarray:
    """What llama.cpp's 4-bit blocks make of a matrix; rows are independent, so their order is no matter."""
    kind = gguf.GGMLQuantizationType.Q4_0
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).reshape(values.shape)


def _logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = load_decoder(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.arange(5, 45)
        return model.logits(model.forward(ids, torch.arange(40), CausalAttention(1)))


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_other_blocks_become_8_bits(kind: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    source = tiny_model("smollm2", tmp_path / "source")
    dense, result, done = again(write_gguf("smollm2", source, kind=kind), tmp_path)
    for module in all_modules(result.config):
        assert result.scheme(module).name == "w8a16-int8"
        assert error_ratio(weights(result, module), dense.tensor(f"{module}.weight")) < 0.01
    assert done.linears == {f"{kind} as w8a16-int8": len(all_modules(result.config))}
    assert result.num_bytes < 0.8 * dense.num_bytes


def test_linears_that_run_as_one_get_the_finest_of_their_schemes(
    tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    source = tiny_model("llama", tmp_path / "source")
    values = np.ascontiguousarray(
        load_file(source / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    )
    q8 = gguf.GGMLQuantizationType.Q8_0

    def with_8_bits(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_v.weight", gguf.quants.quantize(values, q8), raw_dtype=q8)

    file = write_gguf("llama", source, kind="Q4_0", skip=("blk.0.attn_v.weight",), extra=with_8_bits)
    _, result, done = again(file, tmp_path)
    for module in all_modules(result.config):
        raised = module.startswith("model.layers.0.self_attn.") and not module.endswith("o_proj")
        assert result.scheme(module).name == ("w8a16-int8" if raised else "w4a16"), module
    assert done.linears == {
        "Q4_0 as w8a16-int8": 2,
        "Q8_0 as w8a16-int8": 1,
        "Q4_0 as w4a16 g32 asym": 11,
    }


def test_the_command_says_what_became_what_and_how_to_judge(
    tmp_path: Path, write_gguf: WriteGGUF, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    file = write_gguf("llama", tiny_model("llama", tmp_path / "source"), kind="Q4_0")
    out = tmp_path / "out"
    run = CliRunner().invoke(app, ["convert", str(file), "--out", str(out), "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["linears"] == {"Q4_0 as w4a16 g32 asym": 14}
    assert open_checkpoint(out).is_quantized
    done = Requantized(str(file), "OUT", {"Q4_0 as w4a16 g32 asym": 14}, {"Q4_0 as w4a16 g32 asym": 0.0012})
    assert done.to_text().endswith(f"`qinfer eval OUT --against {file}`")


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1"])
def test_blocks_of_other_grids_go_to_awq_by_way_of_quantize(
    kind: str, tmp_path: Path, write_gguf: WriteGGUF, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that the refusal names: 4 bits of what the file's blocks are worth, in AutoAWQ's layout."""
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    file = write_gguf("llama", tiny_model("llama", tmp_path / "source"), kind=kind)
    out, awq = str(tmp_path / "out"), str(tmp_path / "awq")
    options = ["--method", "rtn", "--group-size", "32", "--no-gate"]  # the values can be known beforehand
    run = CliRunner().invoke(app, ["quantize", str(file), "--scheme", "awq", *options, "-o", out])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(app, ["convert", out, "--to", "awq", "-o", awq])
    assert run.exit_code == 0, run.output
    (dense,) = (tmp_path / "cache" / "models").iterdir()
    scheme, source = W4A16(32, symmetric=False), open_checkpoint(dense)
    result = open_checkpoint(Path(awq))
    assert result.quantization.method == "awq"
    for module in all_modules(result.config):
        name = f"{module}.weight"
        expected = quantize_named(scheme, name, source.tensor(name).float(), None, dtype=torch.bfloat16)
        assert torch.equal(weights(result, module), scheme.dequantize(expected)), module


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (
            "awq",
            "a .gguf file goes to awq in two steps: `qinfer convert a.gguf -o DIR` where all linears are "
            "Q4_0, which keep their 4 bits, or else, as for Q4_1, `qinfer quantize a.gguf --scheme awq -o "
            "DIR`; then `qinfer convert DIR --to awq`",
        ),
        (
            "gptq",
            "a .gguf file goes to gptq in two steps: `qinfer convert a.gguf -o DIR`; then "
            "`qinfer convert DIR --to gptq`",
        ),
        ("exl2", "cannot convert to 'exl2'; choose one of compressed-tensors, awq, gptq"),
    ],
)
def test_other_dialects_are_told_the_way_before_the_file_is_read(
    to: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", "a.gguf", "--to", to, "--out", "nowhere"])
    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"qinfer: {said}\n")


def test_a_file_without_quantized_linears_is_refused(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    file = write_gguf("llama", tiny_model("llama", tmp_path / "source"))
    with pytest.raises(UserError, match=r"holds no quantized linear: quantize it \(`qinfer quantize`\)"):
        again(file, tmp_path)
    assert not (tmp_path / "out").exists()
