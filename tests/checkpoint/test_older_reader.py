"""compressed-tensors 0.17.0, which vLLM 0.33 is pinned to, reads what is written here as the newest does.

The newest is tested in test_published_reader.py and, for schemes of float8 and mixed precision, at the end
here. 0.17.0 is installed into a folder of its own and used by a process of its own, in which transformers
loads each checkpoint and says what it reads.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.checkpoint.names import all_modules
from qinfer.checkpoint.writer import CheckpointWriter
from qinfer.quant import (
    W4A16,
    Dense,
    Scheme,
    W8A8Fp8,
    W8A8Fp8Block,
    W8A8Fp8Static,
    W8A8Int8,
    W8A16Fp8,
    W8A16Int8,
)
from qinfer.testing import tiny_model

VERSION = "0.17.0"
SCHEMES: list[Scheme] = [
    *(W8A8Int8(), W8A16Int8(), W8A8Fp8(), W8A8Fp8Static(), W8A8Fp8Block(), W8A16Fp8()),
    *(W4A16(32, True), W4A16(32, False), W4A16(128, False)),
]
MIXES: list[tuple[Scheme, Scheme]] = [  # what most linears have, and what those of RAISED have
    *((W4A16(32, True), W8A16Int8()), (W4A16(32, False), W8A16Int8()), (W8A8Int8(), W8A16Int8())),
    *((W8A8Fp8(), Dense()), (W8A16Int8(), Dense())),
]
RAISED = (*(f"layers.0.self_attn.{x}_proj" for x in "qkv"), "layers.1.mlp.down_proj")
SIZES = {  # of two blocks each way at least: it takes a grid of one column for a scale per row
    **{"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
READER = """
import sys
import compressed_tensors, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
assert compressed_tensors.__version__ == sys.argv[1], compressed_tensors.__version__
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        model(torch.arange(8)[None])  # the first forward unpacks what is packed
    read = {name: t.float().contiguous() for name, t in model.state_dict().items() if "proj.weight" in name}
    save_file({name: t for name, t in read.items() if name.endswith(".weight")}, folder + ".read")
"""


def written(folder: Path, scheme: Scheme, raised: Scheme | None = None) -> Checkpoint:
    source = open_checkpoint(tiny_model("llama", folder / "source", dtype="bfloat16", **SIZES))
    modules = all_modules(source.config)
    others = {module: raised for module in modules if raised and module.endswith(RAISED)}
    writer = CheckpointWriter(source, folder / "out")
    for name in source.names() - {f"{module}.weight" for module in modules}:
        writer.add(name, source.tensor(name))
    for module in modules:
        its = others.get(module, scheme)
        tensors = its.quantize(source.tensor(f"{module}.weight"), dtype=torch.bfloat16)
        if isinstance(its, W8A8Fp8Static):
            tensors = its.with_input_range(tensors, 8.0)
        for suffix, tensor in tensors.items():
            writer.add(f"{module}.{suffix}", tensor)
    writer.finish(quantization_config(scheme, ignore=["lm_head"], exceptions=others))
    return open_checkpoint(folder / "out")


def assert_read(read: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Every linear's weight is what its scheme says that it means, in bfloat16."""
    for module in all_modules(checkpoint.config):
        scheme = checkpoint.scheme(module)
        means = scheme.dequantize(checkpoint.module(module)).bfloat16()
        assert torch.equal(read[f"{module}.weight"].bfloat16(), means), (scheme.label, module)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that version alone; what it imports is the environment's."""
    folder = tmp_path_factory.mktemp("older")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), f"compressed-tensors=={VERSION}"], check=True)
    return folder


def test_older_reader_gives_the_same_weights(older: Path, tmp_path: Path) -> None:
    kinds: list[tuple[Scheme, Scheme | None]] = [*((scheme, None) for scheme in SCHEMES), *MIXES]
    checkpoints = [written(tmp_path / str(i), *kind) for i, kind in enumerate(kinds)]
    folders = [str(checkpoint.path) for checkpoint in checkpoints]
    environment = {**os.environ, "PYTHONPATH": str(older)}
    done = subprocess.run(
        [sys.executable, "-c", READER, VERSION, *folders], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for checkpoint in checkpoints:
        assert_read(load_file(f"{checkpoint.path}.read"), checkpoint)


def newest(checkpoint: Checkpoint) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype="auto")
    with torch.inference_mode():
        model(torch.arange(8)[None])
    return dict(model.state_dict())


@pytest.mark.parametrize("scheme", [W8A8Fp8Static(), W8A8Fp8Block(), W8A16Fp8()], ids=lambda s: s.label)
def test_newest_reader_gives_the_same_weights(scheme: Scheme, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, scheme)
    assert_read(newest(checkpoint), checkpoint)


@pytest.mark.parametrize("mix", [MIXES[0], *MIXES[2:]], ids=lambda mix: mix[0].label)
def test_newest_reader_gives_the_same_weights_in_mixed_precision(
    mix: tuple[Scheme, Scheme], tmp_path: Path
) -> None:
    checkpoint = written(tmp_path, *mix)
    assert {checkpoint.scheme(module) for module in all_modules(checkpoint.config)} == set(mix)
    assert_read(newest(checkpoint), checkpoint)
