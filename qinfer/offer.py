"""Finds what would pass in the place of a candidate that failed its gate, by trying it on the spot.

Tried are, in this order and until one passes: the same files with a plain KV cache and head, where they were
judged with others; the candidate's own scheme, made anew; then the schemes of 8 bits, those that make
serving faster first. Each is the source with its linears rounded as they are loaded; both read the
beginnings of the first windows with plain causal attention, through the same ops as serving. The source reads
first and only its ends are kept, so that two models are never in memory at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qinfer.backend import model_device
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import all_modules
from qinfer.checkpoint.rounded import RoundedCheckpoint
from qinfer.dtypes import name_of
from qinfer.evals import fidelity
from qinfer.evals.gate import Measure
from qinfer.evals.offer import Offer, Trial
from qinfer.evals.thresholds import limits_for, profile_named, scheme_class
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.quant import W4A16, Scheme, W8A8Fp8, W8A8Fp8Block, W8A8Int8, W8A16Fp8, W8A16Int8

if TYPE_CHECKING:
    from qinfer.compare import Comparison

WINDOWS, LENGTH = 8, 256  # tokens read: fewer windows carry no interval
LADDER: tuple[Scheme, ...] = (W8A8Int8(), W8A8Fp8(), W8A16Int8())
_OF_WEIGHTS = (W4A16, W8A8Int8, W8A8Fp8, W8A8Fp8Block, W8A16Int8, W8A16Fp8)  # need no calibration
_ROWS = 128  # of logits at a time


def find_offer(comparison: Comparison, windows: Sequence[Sequence[int]]) -> Offer:
    """Tries schemes on the beginnings of the first windows until one passes."""
    ids = [window[:LENGTH] for window in windows[:WINDOWS]]
    found = _Trials(comparison, ids)
    trials: list[Trial] = []
    with torch.inference_mode():
        for trial in found.all():
            trials.append(trial)
            if trial.passes:
                break
    own = found.own
    return Offer(tuple(trials), sum(map(len, ids)), None if own is None else own.label)


class _Trials:
    """The source, which has read the windows, and what is held against it."""

    def __init__(self, comparison: Comparison, windows: Sequence[Sequence[int]]) -> None:
        self.comparison, self.windows = comparison, windows
        self.source = comparison.source.checkpoint
        self.device = model_device()
        source = self._load(self.source, comparison.reference.dtype)
        with torch.inference_mode():
            self.read = {tuple(window): self._hidden(source, window) for window in windows}
        self.ends = Decoder(source.config, source.embedding, [], source.norm, source.head)

    @property
    def own(self) -> Scheme | None:
        """The candidate's scheme, where it has one alone and weights are all that decides it."""
        candidate = self.comparison.candidate.checkpoint
        first, *others = {candidate.scheme(module) for module in all_modules(candidate.config)}
        return first if not others and type(first) in _OF_WEIGHTS else None

    def all(self) -> Iterator[Trial]:
        """One after another, as long as somebody asks."""
        serving, own = self.comparison.serving, self.own
        dtype = name_of(serving.dtype)
        if (serving.kv_cache_dtype, serving.lm_head_dtype) != (dtype, "auto"):
            how = f"serve them with --kv-cache-dtype {dtype} and without --lm-head-dtype"
            files = self.comparison.candidate.checkpoint
            yield self._trial("the same files with a plain KV cache and head", how, files)
        for scheme in [*([] if own is None else [own]), *(scheme for scheme in LADDER if scheme != own)]:
            yield self._trial(scheme.label, self._command(scheme), RoundedCheckpoint(self.source, scheme))

    def _command(self, scheme: Scheme) -> str:
        words = ["qinfer", "quantize", self.comparison.source.name, "--out", "DIR", "--scheme", scheme.name]
        if isinstance(scheme, W4A16):
            words += ["--group-size", str(scheme.group_size), "--sym" if scheme.symmetric else "--asym"]
        return shlex.join(words)

    def _trial(self, name: str, how: str, checkpoint: Checkpoint) -> Trial:
        """Reads the windows with what `checkpoint` holds and judges it by the limits of its own class."""
        comparison = self.comparison
        kinds = {checkpoint.scheme(module).name for module in all_modules(checkpoint.config)}
        limits = limits_for(
            scheme_class(kinds),
            comparison.source.num_parameters,
            profile_named(comparison.profile),
            other_text=comparison.text_file is not None,
        )
        model = self._load(checkpoint, comparison.serving.dtype)
        scores = fidelity.compare(
            lambda ids: _logits(self.ends, self.read[tuple(ids)]),
            lambda ids: _logits(model, self._hidden(model, ids)),
            self.windows,
        )
        return Trial(name, how, _judged(fidelity.measures(list(scores), limits, seed=comparison.seed)))

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
        return load_decoder(checkpoint, device=self.device, dtype=dtype)

    def _hidden(self, model: Decoder, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(token_ids, device=self.device)
        return model.forward(ids, torch.arange(len(ids), device=self.device), CausalAttention(1))


def _logits(model: Decoder, hidden: Tensor) -> Iterator[Tensor]:
    for rows in torch.split(hidden, _ROWS):
        yield model.logits(rows)


def _judged(measures: tuple[Measure, ...]) -> tuple[Measure, ...]:
    """Those that have a limit."""
    return tuple(measure for measure in measures if measure.limit is not None)
