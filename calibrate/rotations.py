"""Rotations merged into the weights: the same function in another basis, in which nothing sticks out.

A few channels of the residual stream are a hundred times larger than the rest, and 8-bit activations pay for
them. Turned by a random orthogonal matrix the same vectors have no such channels (QuaRot, arXiv 2404.00456;
SpinQuant, 2405.16406). Two rotations can be merged offline, so that serving does not know of them:

    R1  of the residual stream  what writes it (embedding, o, down) is turned, what reads it turned back
                                (q/k/v, gate/up, lm_head); first the gains of the norms are moved into the
                                readers, since a norm without gain commutes with R1
    R2  of each head's values   v's rows are turned, o's columns turned back; the same R2 for all heads

lm_head takes the gain of the last norm, so a head that was the embedding becomes a matrix of its own. Gemma
2 and 3 have gains behind attention and MLP, on what is about to be written: those commute with nothing, and
such models get R2 alone.

R is a Hadamard matrix with random signs where the width is a power of two: every entry has one magnitude,
which spreads an outlier best. Other widths get a random orthogonal matrix.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qinfer.checkpoint.checkpoint import CPU, Checkpoint
from qinfer.checkpoint.names import layer_prefix

_READERS = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "post_attention_layernorm": ("gate_proj", "up_proj", "gate_up_proj"),
}


def rotation(width: int, seed: int) -> Tensor:
    """An orthogonal matrix [width, width], float32, made in float64: random, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if width & (width - 1) == 0:
        signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
        return torch.mul(_hadamard(width), signs[:, None]).float()
    gaussian = torch.randn(width, width, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    return torch.mul(q, r.diagonal().sign()).float()


class RotatedCheckpoint(Checkpoint):
    """A dense checkpoint as it reads in the new basis; tensors are turned when they are asked for.

    Linears and the ends are float32, to be rounded once by whoever stores them. Where R1 is possible the
    configuration says that the head is no longer the embedding.
    """

    def __init__(self, source: Checkpoint, seed: int) -> None:
        vars(self).update(vars(source))
        self._source = source
        config = source.config
        self._r1 = None if config.sandwich_norms else rotation(config.hidden_size, seed)
        self._r2 = rotation(config.head_dim, seed + 1)
        if self._r1 is not None and config.tie_word_embeddings:
            self.config = replace(config, tie_word_embeddings=False)
            self.raw_config = _untied(source.raw_config)

    @property
    def unties(self) -> bool:
        """Whether the head becomes a matrix of its own."""
        return self.config.tie_word_embeddings != self._source.config.tie_word_embeddings

    def names(self) -> frozenset[str]:
        """The source's tensors, and a head of its own where it becomes one."""
        return self._source.names() | ({"lm_head.weight"} if self.unties else set())

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what is stored in its place."""
        return self._source.header(self._stored(name))

    def tensor(self, name: str, device: torch.device = CPU) -> Tensor:
        """The tensor in the new basis, made now on `device`."""
        relative = name.removeprefix(self.config.tensor_prefix)
        if relative.startswith("layers."):
            return self._of_layer(name, device, *relative.split(".", 2)[1:])
        stored = self._source.tensor(self._stored(name), device)
        if self._r1 is None or not name.endswith(".weight"):
            return stored
        if relative == "norm.weight":
            return torch.full_like(stored, 1.0 - self.config.norm_offset)
        turned = stored.float()
        if name == "lm_head.weight":
            turned = turned * self._gain(f"{self.config.tensor_prefix}norm.weight", device)
        return (turned @ self._r1_on(device)).to(stored.dtype)

    def _r1_on(self, device: torch.device) -> Tensor:
        """R1, which stays where it was asked for last."""
        assert self._r1 is not None
        self._r1 = self._r1.to(device)
        return self._r1

    def _stored(self, name: str) -> str:
        tied = self.unties and name == "lm_head.weight"
        return f"{self.config.tensor_prefix}embed_tokens.weight" if tied else name

    def _gain(self, name: str, device: torch.device) -> Tensor:
        return self._source.tensor(name, device).float() + self.config.norm_offset

    def _of_layer(self, name: str, device: torch.device, index: str, relative: str) -> Tensor:
        stored = self._source.tensor(name, device)
        module, kind = relative.rsplit(".", 1)
        linear = module.rsplit(".", 1)[-1]
        if linear in _READERS:
            return stored if self._r1 is None else torch.full_like(stored, 1.0 - self.config.norm_offset)
        if not linear.endswith("_proj"):
            return stored
        tensor = stored.float()
        if linear in ("v_proj", "qkv_proj"):
            tensor = self._turned_values(tensor)
        if linear == "o_proj" and kind == "weight":
            tensor = (tensor.view(len(tensor), -1, self.config.head_dim) @ self._r2.to(device)).flatten(1)
        if self._r1 is None:
            return tensor
        if linear in ("o_proj", "down_proj"):  # weight and bias alike
            return self._r1_on(device).T @ tensor
        if kind == "bias":
            return tensor
        norm = next(norm for norm, readers in _READERS.items() if linear in readers)
        gain = self._gain(f"{layer_prefix(self.config, int(index))}{norm}.weight", device)
        return tensor * gain @ self._r1_on(device)

    def _turned_values(self, tensor: Tensor) -> Tensor:
        """Rows of v, weight or bias: the last of a fused projection."""
        config, tensor = self.config, tensor.clone()
        rows = tensor[-config.num_kv_heads * config.head_dim :]
        heads = rows.view(config.num_kv_heads, config.head_dim, -1)
        rows.copy_((self._r2.T.to(rows.device) @ heads).view_as(rows))
        return tensor


def _untied(raw: dict[str, Any]) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    for holder in (raw, raw.get("text_config")):
        if holder is not None:
            holder["tie_word_embeddings"] = False
    return raw


def _hadamard(width: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.div(matrix, width**0.5)
