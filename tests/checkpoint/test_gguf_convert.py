"""A GGUF file gives back the model that was written into it (case Q28)."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.checkpoint.gguf_convert import convert_gguf, undo_interleaving
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

WriteGGUF = Callable[..., Path]
FAMILIES = (
    *("llama", "smollm2", "qwen2", "qwen2_5", "qwen3", "gemma2", "gemma3"),
    *("phi3", "smollm3", "granite"),
)
# a GGUF file cannot say these; llama.cpp fixes them by architecture and size
FIXED = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 1]},
}


def convert(file: Path, folder: Path) -> Checkpoint:
    folder.mkdir()
    convert_gguf(file, folder, progress=lambda text: None)
    return open_checkpoint(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_q28_every_tensor_and_field_comes_back(family: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    source = open_checkpoint(tiny_model(family, tmp_path / "source", **FIXED.get(family, {})))
    out = convert(write_gguf(family, source.path), tmp_path / "out")
    assert out.names() == source.names()
    for name in source.names():
        if family.startswith("gemma") and name.endswith("norm.weight"):  # 1 + w loses w's last bits
            torch.testing.assert_close(out.tensor(name), source.tensor(name), rtol=0, atol=2**-23)
        else:
            assert torch.equal(out.tensor(name), source.tensor(name)), name
    assert replace(out.config, eos_token_ids=(), bos_token_id=None) == replace(
        source.config, eos_token_ids=(), bos_token_id=None
    )
    assert out.raw_config["dtype"] == "float32"


def test_q28_bias_of_q_and_k_is_reordered_with_its_rows(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    source = open_checkpoint(
        tiny_model("llama3", tmp_path / "source", attention_bias=True, rope_scaling=None)
    )
    out = convert(write_gguf("llama3", source.path), tmp_path / "out")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}.bias"
        assert torch.equal(out.tensor(name), source.tensor(name))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_q28_transformers_reads_the_same_weights_from_the_file(
    family: str, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    """An independent reader of the same file: the files of the test are what llama.cpp would write."""
    file = write_gguf(family, tiny_model(family, tmp_path / "source"))
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    out = convert(file, tmp_path / "out")
    parameters = theirs.state_dict()
    for name in out.names():
        assert torch.equal(parameters[name], out.tensor(name)), name


def test_q28_rows_of_one_head() -> None:
    interleaved = np.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15], dtype=np.float32)
    assert undo_interleaving(interleaved, 2).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Q8_0", torch.bfloat16), ("BF16", torch.bfloat16), ("F16", torch.float16)]
)
def test_type_of_the_weights_decides_the_models(
    kind: str, dtype: torch.dtype, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    source = open_checkpoint(tiny_model("qwen3", tmp_path / "source"))
    out = convert(write_gguf("qwen3", source.path, kind=kind), tmp_path / "out")
    assert out.raw_config["dtype"] == str(dtype).removeprefix("torch.")
    quant = gguf.GGMLQuantizationType[kind]
    for name in source.names():
        values = source.tensor(name)
        if values.ndim == 2:
            stored = gguf.quants.quantize(values.numpy(), quant)
            values = torch.tensor(gguf.quants.dequantize(stored, quant), dtype=torch.float32)
        assert torch.equal(out.tensor(name), values.to(dtype)), name


def test_tokenizer_template_and_ends_come_along(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    folder = tiny_model("qwen3", tmp_path / "source")

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(256)
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_uint32("general.sampling.top_k", 20)

    out = convert(write_gguf("qwen3", folder, extra=extra), tmp_path / "out").path
    before, after = Tokenizer.load(folder), Tokenizer.load(out)
    messages = [{"role": "user", "content": "Hello  12 wörld 😊"}]
    assert after.apply_chat_template(messages) == before.apply_chat_template(messages)
    assert after.eos_token_ids == {258, 256}
    assert json.loads((out / "generation_config.json").read_text()) == {
        **{"bos_token_id": 256, "eos_token_id": [258, 256]},
        **{"temperature": 0.6, "top_k": 20, "do_sample": True},
    }


def test_q27_same_ids_as_transformers_reads_from_the_file(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    file = write_gguf("qwen3", tiny_model("qwen3", tmp_path / "source"))
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = Tokenizer.load(convert(file, tmp_path / "out").path)
    for text in ("Hello world! Café déjà vu — 123 😊", "  two  spaces\n\n", "<|im_start|>user", "12345", ""):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.hf.special_tokens_map == theirs.special_tokens_map
    assert ours.hf.chat_template == theirs.chat_template


def test_llama3_scaling_is_recognized_by_its_factors(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    folder = tiny_model(
        "llama3", tmp_path / "source", head_dim=64, max_position_embeddings=131072, rope_scaling=scaling
    )
    factors = []
    for i in range(32):  # Llama 3.1's rule, one frequency at a time
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 64)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    assert len({round(factor, 6) for factor in factors}) > 3

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))

    source = open_checkpoint(folder)
    assert (
        convert(write_gguf("llama3", folder, extra=extra), tmp_path / "out").config.rope == source.config.rope
    )
    factors[5] = 2.0
    with pytest.raises(UnsupportedModelError, match=r"not those of Llama 3\.1"):
        convert(write_gguf("llama3", folder, extra=extra), tmp_path / "other")


def test_longrope_factors_of_phi3(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    long, short = [1.0 + i for i in range(8)], [1.0 + i / 8 for i in range(8)]
    scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    folder = tiny_model(
        "phi3",
        tmp_path / "source",
        max_position_embeddings=1024,
        rope_scaling=scaling,
        sliding_window=None,
    )

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(256)
        writer.add_tensor("rope_factors_long.weight", np.array(long, dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(short, dtype=np.float32))

    source = open_checkpoint(folder)
    assert (
        convert(write_gguf("phi3", folder, extra=extra), tmp_path / "out").config.rope == source.config.rope
    )


def test_missing_and_surplus_tensors_are_named(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    folder = tiny_model("qwen2", tmp_path / "source")
    lost = ("blk.1.attn_k.bias", "blk.0.ffn_down.weight")
    with pytest.raises(CheckpointError, match=r"lacks tensors: blk.0.ffn_down.weight, blk.1.attn_k.bias"):
        convert(write_gguf("qwen2", folder, skip=lost), tmp_path / "a")
    surplus = np.zeros((4, 4), dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match=r"no place for: blk.0.ffn_gate_inp.weight"):
        convert(
            write_gguf("qwen2", folder, extra=lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", surplus)),
            tmp_path / "b",
        )


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (0, "it is empty"),
        (3, "it ends within its header, after 3 bytes"),
        (100, "it ends within its header, after 100 bytes"),
        (20_000, "it has 20,000 of {size:,} bytes"),
        (-5000, "it has {short:,} of {size:,} bytes"),
        (-1, "it has {less:,} of {size:,} bytes"),
    ],
)
def test_file_that_is_cut_off(keep: int, said: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    file = write_gguf("qwen2", tiny_model("qwen2", tmp_path / "source"))
    content = file.read_bytes()
    size = len(content)
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError) as raised:
        convert(file, tmp_path / "out")
    told = said.format(size=size, short=size - 5000, less=size - 1)
    assert str(raised.value) == f"{file} is not a whole GGUF file: {told}; fetch it again"


@pytest.mark.parametrize(
    ("at", "written", "said"),
    [
        (0, b"<htm", "is not a GGUF file: it begins with b'<htm', not b'GGUF'; look at what was fetched"),
        (4, b"\x09\0\0\0", "is damaged, or a kind of GGUF that is not known here (.*version 9.*); fetch"),
        (24, b"\xff\xff\xff\x7f", "is not a whole GGUF file: it ends within its header"),  # a text's length
    ],
)
def test_file_that_is_another_or_damaged(
    at: int, written: bytes, said: str, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    file = write_gguf("qwen2", tiny_model("qwen2", tmp_path / "source"))
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(written)
    with pytest.raises(CheckpointError, match=said.replace("(", r"\(").replace(")", r"\)")):
        convert(file, tmp_path / "out")


def test_other_architectures_experts_and_parts_are_refused_by_name(
    tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    def written(arch: str, **sizes: int) -> Path:
        writer = gguf.GGUFWriter(tmp_path / f"{arch}.gguf", arch)
        for key, value in sizes.items():
            writer.add_uint32(key.replace("__", "."), value)
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / f"{arch}.gguf"

    with pytest.raises(
        UnsupportedModelError, match="'mamba' is not supported; supported: llama, qwen2, qwen3, gemma2"
    ):
        convert(written("mamba"), tmp_path / "a")
    with pytest.raises(UnsupportedModelError, match="experts"):
        convert(written("llama", llama__expert_count=8), tmp_path / "b")
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        convert(written("qwen2", split__count=3), tmp_path / "c")
