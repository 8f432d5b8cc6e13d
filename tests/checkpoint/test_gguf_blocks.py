"""GGUF's blocks, Q4_0 to Q8_0 and the K-quants, against llama.cpp's layouts written out one value at a time.

The blocks are random bytes with scales of a sane size, so every field of a layout is in use. What comes out
is a dense model, which is re-quantized on request (`qinfer quantize model.gguf --scheme ...`).
"""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.checkpoint.gguf_convert import convert_gguf
from qinfer.checkpoint.names import all_modules
from qinfer.hub import resolve
from qinfer.jobs import quantize
from qinfer.testing import tiny_model

SIZES = {
    **{"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 384},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1},
}


def half(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def legacy(block: bytes, high: bool, offset: bool, middle: int) -> list[float]:
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, offset (_1), fifth bits (Q5), nibbles j and j + 16 in byte j."""
    d, at = half(block[:2]), 2
    m = half(block[2:4]) if offset else 0.0
    at += 2 if offset else 0
    fifth = int.from_bytes(block[at : at + 4], "little") if high else 0
    nibbles = block[at + (4 if high else 0) :]
    codes = [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]
    return [d * (code + 16 * (fifth >> j & 1) - middle) + m for j, code in enumerate(codes)]


def q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * code for code in struct.unpack("32b", block[2:])]


def scales_and_minima(packed: bytes) -> list[tuple[int, int]]:
    """Eight pairs of 6 bits in 12 bytes."""
    pairs = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    return pairs + [
        ((packed[j + 4] & 15) | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        for j in range(4, 8)
    ]


def q4_k_or_q5_k(block: bytes, high: bool) -> list[float]:
    d, dmin = half(block[:2]), half(block[2:4])
    fifth, codes = (block[16:48], block[48:]) if high else (bytes(32), block[16:])
    values = []
    for j, (scale, minimum) in enumerate(scales_and_minima(block[4:16])):
        for i in range(32):
            code = codes[32 * (j // 2) + i] >> 4 * (j % 2) & 15
            values.append(d * scale * (code + 16 * (fifth[i] >> j & 1)) - dmin * minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, scales, d = (
        block[:128],
        block[128:192],
        struct.unpack("16b", block[192:208]),
        half(block[208:]),
    )
    values = []
    for n in range(256):
        part, quarter, i = n // 128, n % 128 // 32, n % 32
        code = low[64 * part + 32 * (quarter % 2) + i] >> 4 * (quarter // 2) & 15
        code |= (high[32 * part + i] >> 2 * quarter & 3) << 4
        values.append(d * scales[n // 16] * (code - 32))
    return values


def q2_k(block: bytes) -> list[float]:
    scales, codes, d, dmin = block[:16], block[16:80], half(block[80:82]), half(block[82:])
    values = []
    for n in range(256):
        code = codes[32 * (n // 128) + n % 32] >> 2 * (n % 128 // 32) & 3
        scale = scales[n // 16]
        values.append(d * (scale & 15) * code - dmin * (scale >> 4))
    return values


def q3_k(block: bytes) -> list[float]:
    mask, codes, packed, d = block[:32], block[32:96], block[96:108], half(block[108:])
    scales = [
        (packed[i % 8] >> 4 * (i // 8) & 15) | (packed[8 + i % 4] >> 2 * (i // 4) & 3) << 4 for i in range(16)
    ]
    values = []
    for n in range(256):
        code = codes[32 * (n // 128) + n % 32] >> 2 * (n % 128 // 32) & 3
        code -= 0 if mask[n % 32] >> n // 32 & 1 else 4
        values.append(d * (scales[n // 16] - 32) * code)
    return values


# bytes of a block, where its float16 scales lie, and what it means
BLOCKS: dict[str, tuple[int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    "Q4_0": (18, (0,), lambda block: legacy(block, False, False, 8)),
    "Q4_1": (20, (0, 2), lambda block: legacy(block, False, True, 0)),
    "Q5_0": (22, (0,), lambda block: legacy(block, True, False, 16)),
    "Q5_1": (24, (0, 2), lambda block: legacy(block, True, True, 0)),
    "Q8_0": (34, (0,), q8_0),
    "Q2_K": (84, (80, 82), q2_k),
    "Q3_K": (110, (108,), q3_k),
    "Q4_K": (144, (0, 2), lambda block: q4_k_or_q5_k(block, False)),
    "Q5_K": (176, (0, 2), lambda block: q4_k_or_q5_k(block, True)),
    "Q6_K": (210, (208,), q6_k),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_mean_what_llama_cpp_says(
    kind: str, tmp_path: Path, write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, scale_at, meaning = BLOCKS[kind]
    length = 32 if kind[-2] == "_" and kind[-1] in "01" else 256
    random = np.random.default_rng(7)
    written: list[NDArray[np.uint8]] = []

    def blocks(data: NDArray[np.float32], quant: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
        made = random.integers(0, 256, (data.size // length, size), dtype=np.uint8)
        for at in scale_at:
            small = random.uniform(0.001, 0.01, len(made)).astype(np.float16)
            made[:, at : at + 2] = small.view(np.uint8).reshape(-1, 2)
        written.append(made)
        return made.reshape(data.shape[0], -1)

    monkeypatch.setattr(gguf.quants, "quantize", blocks)
    source = tiny_model("qwen2_5", tmp_path / "source", **SIZES)  # whose q and k keep their rows' order
    file = write_gguf("qwen2_5", source, kind=kind)
    (tmp_path / "out").mkdir()
    convert_gguf(file, tmp_path / "out", progress=lambda text: None)
    out = open_checkpoint(tmp_path / "out")
    assert out.config.dtype == "bfloat16"
    name = "model.layers.0.mlp.down_proj.weight"
    means = {bytes(block): meaning(bytes(block)) for made in written for block in made[:64]}
    expected = {tuple(torch.tensor(values).bfloat16().tolist()) for values in means.values()}
    rows = out.tensor(name)[: 64 * length // 256].reshape(-1, length)
    assert {tuple(row.tolist()) for row in rows} <= expected
    assert len(means) >= len(rows) == 64


@pytest.mark.parametrize("scheme", ["w8a16-int8", "w4a16"])
def test_gguf_is_requantized_on_request(
    scheme: str, tmp_path: Path, write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QINFER_CACHE", str(tmp_path / "cache"))
    source = tiny_model("qwen2_5", tmp_path / "source", **SIZES)
    file = write_gguf("qwen2_5", source, kind="Q8_0")
    quantize(str(file), tmp_path / "out", scheme=scheme, method="rtn", gate=False, progress=False)
    out, dense = open_checkpoint(tmp_path / "out"), open_checkpoint(resolve(str(file)))
    for module in all_modules(out.config):
        made = out.scheme(module).quantize(dense.tensor(f"{module}.weight"), dtype=torch.bfloat16)
        read = out.module(module)
        assert out.scheme(module).name == scheme
        assert all(torch.equal(read[suffix], tensor) for suffix, tensor in made.items()), module
