"""What a quantize run keeps in memory and on disk at its worst moment, from shapes alone, as plain ints.

A layer at a time is in memory, so the peak depends on one layer, on the tokens and on the embedding, not on
the number of layers. Three moments may be the worst:

    layer    the layer in float32, as searches change it, and as the model runs it; what rounding its largest
             group takes; the streams of all tokens: residual before and after attention, a group's inputs
    writing  the layer's file tensors: as made, as gathered, and as the bytes that go to the disk
    ends     the embedding on its way in, or from the source to the copy

Pages of the source's files, which are mapped, are counted as the process's by the system and not here: it
takes them back when it needs them.

With a GPU the layer and one batch are there, the streams in host memory; where memory does not suffice for
the streams they are on the disk, and one batch's are in memory. On disk the copy grows shard by shard; beside
it lie the shard that is being joined and the streams before and after a layer, from which a run that was
stopped goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from qinfer.calibrate.block import batch_tokens
from qinfer.calibrate.mixing import unit_bits
from qinfer.calibrate.recipe import Recipe
from qinfer.checkpoint.names import global_tensors, layer_groups, layer_norms, linear_shape, num_weights
from qinfer.checkpoint.shard_writer import MAX_SHARD_BYTES
from qinfer.config import ModelConfig
from qinfer.engine.footprint import ITEM_BYTES
from qinfer.quant import W4A16

SEARCH_TOKENS = 2048  # tokens that every candidate is tried on; statistics use all
_ROUNDING = 4  # float32 copies of the largest group while it is rounded: scaled, its codes, read back, errors
_GPTQ = 4  # more of them: joined, in another order, while and after it is rounded
_FACTORS = 4  # matrices of the width of a group's inputs: moments, reordered, factor, one being made
_SPARE = 0.9  # of the free memory is used before streams go to the disk


@dataclass(frozen=True)
class Work:
    """A run in numbers: `tokens` in sequences of `length` are 0 where no text is read."""

    config: ModelConfig
    recipe: Recipe
    tokens: int
    length: int
    item_bytes: int  # of activations
    on_gpu: bool = False
    on_disk: bool = False  # the streams

    @property
    def storage(self) -> int:
        """Bytes of a number in the checkpoint's dtype."""
        return ITEM_BYTES[self.config.dtype]

    @property
    def group_weights(self) -> dict[str, int]:
        """Weights of a layer's groups."""
        return {g.name: num_weights(self.config, g.modules) for g in layer_groups(self.config)}

    @property
    def widths(self) -> dict[str, int]:
        """Input widths of a layer's groups."""
        return {g.name: linear_shape(self.config, g.modules[0])[1] for g in layer_groups(self.config)}

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's linears."""
        return sum(self.group_weights.values())

    @property
    def file_bytes_per_layer(self) -> int:
        """What a quantized layer takes in the file."""
        config, scheme = self.config, self.recipe.scheme
        bits = sum(unit_bits(config, group.name, scheme, self.storage) for group in layer_groups(config))
        return bits // 8 + sum(prod(shape) for shape in layer_norms(config).values()) * self.storage

    @property
    def other_bytes(self) -> int:
        """What lies outside the layers, copied as it is."""
        return sum(prod(shape) for shape in global_tensors(self.config).values()) * self.storage

    @property
    def searched(self) -> int:
        """Tokens that candidates are tried on."""
        return min(self.tokens, SEARCH_TOKENS)

    @property
    def made_anew(self) -> bool:
        """Whether inputs are made of the stream for each look (rest.py)."""
        return self.on_gpu or self.on_disk

    @property
    def stream_bytes(self) -> int:
        """The residual streams of all tokens."""
        return self.tokens * self.config.hidden_size * self.item_bytes


def spills(work: Work, free: int) -> bool:
    """Whether the streams have to wait on the disk, `free` being the bytes of memory that a run may take."""
    here = sum(memory(work).values())
    return here > _SPARE * free and sum(memory(replace(work, on_disk=True)).values()) < here


def memory(work: Work) -> dict[str, int]:
    """Bytes of what is alive in RAM at the worst moment, by name, beside the process itself."""
    streams = 0 if work.on_disk else work.stream_bytes
    moments = {
        "layer": {"streams": streams} if work.on_gpu else _layer(work),
        "writing": {
            "streams": streams,
            "file tensors": (2 if work.on_gpu else 3) * work.file_bytes_per_layer,
        },
        "ends": {
            "streams": streams,
            "embedding": 3 * work.config.vocab_size * work.config.hidden_size * work.storage,
        },
    }
    return max(moments.values(), key=lambda terms: sum(terms.values()))


def gpu_memory(work: Work) -> dict[str, int]:
    """Bytes of what is alive on the GPU at the worst moment, by name; nothing where there is none."""
    return _layer(work) if work.on_gpu else {}


def disk(work: Work) -> dict[str, int]:
    """Bytes in the folder of the result at the worst moment, by name; the first is what stays."""
    copy = work.config.num_layers * work.file_bytes_per_layer + work.other_bytes
    joined = max(MAX_SHARD_BYTES, work.file_bytes_per_layer)
    return {
        "checkpoint": copy,
        "shard being joined": min(copy, joined),
        "streams": (3 if work.on_disk else 2) * work.stream_bytes,
    }


def _layer(work: Work) -> dict[str, int]:
    config, item = work.config, work.item_bytes
    hidden, inner = config.hidden_size, config.intermediate_size
    largest = max(work.group_weights.values())
    terms = {"layer in float32": 4 * work.layer_weights, "file tensors": work.file_bytes_per_layer}
    if not work.tokens:
        return {**terms, "rounding": 4 * _ROUNDING * largest}
    batch = min(work.tokens, max(batch_tokens(config, on_gpu=work.on_gpu), work.length))
    width = max(work.widths.values())
    gptq = work.recipe.by_gptq
    terms |= {
        "layer as it runs": item * work.layer_weights,
        "rounding": 4 * (_ROUNDING + (_GPTQ if gptq else 0)) * largest + item * largest,
        "a batch": item * batch * 3 * inner,
        "streams": work.tokens * (item * (3 * hidden + width) + 8 * config.head_dim),
    }
    if work.made_anew:  # one batch's at a time
        terms["streams"] = batch * (item * (3 * hidden + width) + 8 * config.head_dim)
    if gptq:
        terms["second moments"] = 4 * _FACTORS * width * width
    elif isinstance(work.recipe.scheme, W4A16):
        terms["second moments"] = 4 * width * work.recipe.scheme.group_size
    if work.recipe.transform:
        terms["search"] = work.searched * (item * sum(work.widths.values()) + 4 * (3 * inner + 3 * hidden))
    return terms
