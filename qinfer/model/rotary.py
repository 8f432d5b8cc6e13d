"""Frequencies of the rotary embedding, with every published way to stretch the context.

A pair of dimensions i turns by position * theta^(-2i/R). `linear` slows all pairs down (Chen et al. 2023),
`dynamic` raises theta, `yarn` slows the slow pairs only and sharpens attention (Peng et al. 2023), `llama3`
is Llama 3.1's smooth cut between the two, `longrope` has a searched factor per pair (Ding et al. 2024). The
formulas are those of transformers' modelling, which published checkpoints were validated with.

`dynamic` and `longrope` depend on how long a sequence becomes. Here that is settled once for a decoder, by
the longest sequence it will be given (`context_len`): if it followed the sequences of a step, the logits of a
token would depend on its neighbours in the batch, and keys in the cache on what came after them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qinfer import ops
from qinfer.config import RopeConfig


class Rotation(NamedTuple):
    """What `ops.rope` takes, for the tokens of one step: both [T, R], the sine's first half negated."""

    cos: Tensor
    sin: Tensor


class Rope(NamedTuple):
    """Rotations of one step: of most layers, and of those with a window (the same unless Gemma 3)."""

    full: Rotation
    local: Rotation


class RotaryEmbedding:
    """Frequencies of one kind of layer for sequences up to `context_len` tokens."""

    def __init__(self, config: RopeConfig, context_len: int, device: torch.device) -> None:
        frequencies, self.magnitude = frequencies_and_magnitude(config, context_len)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Angles in float32 for positions [T]; cosines and sines in `dtype`."""
        return Rotation(*ops.rope_angles(positions, self.frequencies, self.magnitude, dtype))


def frequencies_and_magnitude(config: RopeConfig, context_len: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, [R/2] float32, and the factor on cosines and sines."""
    scaling = dict(config.scaling)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    base = 1.0 / torch.pow(config.theta, exponents)
    match config.kind:
        case "default":
            return base, 1.0
        case "linear":
            return base / scaling["factor"], 1.0
        case "dynamic":
            return 1.0 / torch.pow(_dynamic_theta(config, scaling, context_len), exponents), 1.0
        case "llama3":
            return _llama3(base, scaling), 1.0
        case "yarn":
            return _yarn(config, base, scaling)
        case "longrope":
            return _longrope(base, scaling, context_len)


def _dynamic_theta(config: RopeConfig, scaling: dict[str, Any], context_len: int) -> float:
    trained_len, factor = scaling["max_position_embeddings"], scaling["factor"]
    stretch = factor * max(context_len, trained_len) / trained_len - (factor - 1)
    return float(config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2)))


def _llama3(base: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Pairs that turn more than `high` times over the trained length stay, under `low` times are slowed."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = base * float(scaling["original_max_position_embeddings"]) / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return base * (kept + (1 - kept) / float(scaling["factor"]))


def _yarn(config: RopeConfig, base: Tensor, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    factor, trained_len = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        turns = trained_len / (times * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    first = pair_that_turns(scaling.get("beta_fast", 32))
    last = pair_that_turns(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    pairs = torch.arange(len(base), dtype=torch.float32)
    slowed = ((pairs - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    frequencies = slowed * base / factor + (1 - slowed) * base

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        mscale, over_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = sharpness(mscale) / sharpness(over_all) if mscale and over_all else sharpness(1.0)
    return frequencies, float(magnitude)


def _longrope(base: Tensor, scaling: dict[str, Any], context_len: int) -> tuple[Tensor, float]:
    trained_len = scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if context_len > trained_len else "short_factor"]
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        factor = scaling.get("factor", scaling["max_position_embeddings"] / trained_len)
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained_len)) if factor > 1 else 1.0
    return base / torch.tensor(factors, dtype=torch.float32), float(magnitude)
