"""One decoder layer on the workbench: dense weights that can be changed, and batches to run it on.

The layer is the model's own (`qinfer.model`), with plain causal attention over sequences of equal length;
sequences of different lengths go into different batches, so nothing is ever padded. Hidden states replace
one another from layer to layer, each waiting where rest.py says, and only one layer's weights are in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qinfer.calibrate.health import check_finite
from qinfer.calibrate.mappings import Block
from qinfer.calibrate.observe import LayerTap
from qinfer.calibrate.rest import Rest, Slot
from qinfer.checkpoint.checkpoint import CPU, Checkpoint
from qinfer.checkpoint.names import layer_modules, layer_prefix, layer_tensors
from qinfer.config import ModelConfig
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder
from qinfer.model.head import make_head
from qinfer.model.layer import Layer
from qinfer.model.linear import FileTensors
from qinfer.model.rotary import Rope
from qinfer.quant import Dense

MAX_BATCH_TOKENS = 4096
_CACHED_BATCH_TOKENS = 1024


@dataclass
class Batch:
    """`num_sequences` sequences of one length: their residual stream [B*T, H], replaced layer by layer."""

    slot: Slot  # where the stream waits
    num_sequences: int
    rope: Rope
    keep: bool  # whether the searches run on it; statistics come from all batches
    rest: Rest

    @property
    def hidden(self) -> Tensor:
        """The residual stream, on the device."""
        return self.slot.get()

    @hidden.setter
    def hidden(self, hidden: Tensor) -> None:
        self.slot.put(hidden)

    @property
    def attend(self) -> CausalAttention:
        """Causal attention within each sequence."""
        return CausalAttention(self.num_sequences)


def batch_tokens(config: ModelConfig, *, on_gpu: bool) -> int:
    """Tokens in a batch, at most: on a processor so few that what lies between products stays in its caches.

    Wide layers do no better for it, as products are most of their work and read all weights for each batch.
    """
    return (
        MAX_BATCH_TOKENS
        if on_gpu
        else min(MAX_BATCH_TOKENS, max(_CACHED_BATCH_TOKENS, 2 * config.hidden_size))
    )


def load_block(checkpoint: Checkpoint, index: int, device: torch.device = CPU) -> Block:
    """Reads one layer's tensors as float32, by relative name; CheckpointError for one missing or NaN."""
    prefix = layer_prefix(checkpoint.config, index)
    block = {}
    for name in layer_tensors(checkpoint.config, index):
        tensor = checkpoint.tensor(name, device).float()
        check_finite(name, tensor)
        block[name.removeprefix(prefix)] = tensor
    return block


def biases_and_norms(config: ModelConfig, block: Block) -> Block:
    """What a layer has beside the weights of its linears."""
    weights = {f"{module}.weight" for module in layer_modules(config)}
    return {name: tensor for name, tensor in block.items() if name not in weights}


def dense_layer(
    config: ModelConfig, index: int, block: Block, *, device: torch.device, dtype: torch.dtype
) -> Layer:
    """The layer with the block's weights as they are, in `dtype`."""
    dense = {module: (Dense(), {"weight": block[f"{module}.weight"]}) for module in layer_modules(config)}
    return layer_of(config, index, block, dense, device=device, dtype=dtype)


def layer_of(
    config: ModelConfig,
    index: int,
    block: Block,
    linears: Mapping[str, FileTensors],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Layer:
    """The layer with these linears and the block's biases and norms."""
    others = biases_and_norms(config, block)
    return Layer.build(config, index, linears, others, device=device, dtype=dtype)


def embed_batches(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    *,
    search_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> list[Batch]:
    """Embeds every sequence; about `search_tokens` tokens of them, spread evenly, are marked to be kept.

    With a `folder` the streams wait in files there. The embedding, large and needed once, stays on the CPU.
    """
    rest = Rest(device, folder)
    config = checkpoint.config
    embedding = checkpoint.tensor(f"{config.tensor_prefix}embed_tokens.weight").to(dtype)
    stem = _stem(config, embedding)
    turns = _stem(config, embedding[:1].to(device))
    ropes: dict[tuple[int, int], Rope] = {}
    batches: list[Batch] = []
    size = batch_tokens(config, on_gpu=device.type == "cuda")
    for keep, ids in _equal_lengths(sequences, _spread(sequences, search_tokens), size):
        shape = len(ids), len(ids[0])
        if shape not in ropes:
            ropes[shape] = turns.rope(torch.arange(shape[1], device=device).repeat(shape[0]))
        slot = rest.slot(f"{len(batches):05d}")
        slot.put(stem.embed(torch.tensor(ids).flatten()))
        batches.append(Batch(slot, len(ids), ropes[shape], keep, rest))
    return batches


def observe(layer: Layer, batches: Sequence[Batch]) -> LayerTap:
    """Runs the layer on every batch for its groups' inputs; the hidden states stay as they are."""
    tap = LayerTap()
    for batch in batches:
        tap.keep = batch.keep
        layer(batch.hidden, batch.rope, batch.attend, tap)
    return tap


def _stem(config: ModelConfig, embedding: Tensor) -> Decoder:
    """A decoder without layers: it embeds, and makes rotations on the embedding's device."""
    return Decoder(config, embedding, [], torch.ones(config.hidden_size), make_head(embedding))


def _spread(sequences: Sequence[Sequence[int]], num_tokens: int) -> set[int]:
    """Indices of sequences that hold about `num_tokens` tokens, evenly spaced; all if they are few."""
    total = sum(map(len, sequences))
    if total <= num_tokens:
        return set(range(len(sequences)))
    count = max(1, round(len(sequences) * num_tokens / total))
    return {i * len(sequences) // count for i in range(count)}


def _equal_lengths(
    sequences: Sequence[Sequence[int]], kept: set[int], batch_tokens: int
) -> list[tuple[bool, list[Sequence[int]]]]:
    """Groups sequences of one length and one purpose into batches of at most `batch_tokens` tokens."""
    groups: dict[tuple[bool, int], list[Sequence[int]]] = defaultdict(list)
    for i, sequence in enumerate(sequences):
        groups[i in kept, len(sequence)].append(sequence)
    batches = []
    for (keep, length), members in groups.items():
        size = max(1, batch_tokens // length)
        batches += [(keep, members[i : i + size]) for i in range(0, len(members), size)]
    return batches
