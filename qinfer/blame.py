"""Finds the part of a failed checkpoint that did the damage, by putting its parts into the source one by one.

The source reads a few windows in its reference dtype. At every layer the candidate's layer is given the very
same residual stream, in its own dtype, and what it adds is compared. The layers that are furthest off, and
the ends (embedding and head, one part where they are tied), are then tried alone: the stream goes on from
what they made through the source's own layers. All of it runs through the same ops as serving, with plain
causal attention instead of pages.

Where the candidate keeps its stream in another basis (`quantize --rotate`) it is given the source's turned
there, and what it makes is turned back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qinfer.backend import model_device
from qinfer.basis import turn_between
from qinfer.evals import fidelity
from qinfer.evals.blame import Blame, Part, suspects_of
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder, load_decoder

if TYPE_CHECKING:
    from qinfer.compare import Comparison

WINDOWS, LENGTH = 4, 256  # tokens read: enough for a mean, little enough to do a dozen times
_ROWS = 128  # of logits at a time


def find_blame(comparison: Comparison, windows: Sequence[Sequence[int]]) -> Blame:
    """Reads the beginnings of the first windows with both models and says which part moved what."""
    device = model_device()
    reference, serving = comparison.reference, comparison.serving
    source = load_decoder(comparison.source.checkpoint, device=device, dtype=reference.dtype)
    candidate = load_decoder(
        comparison.candidate.checkpoint,
        device=device,
        dtype=serving.dtype,
        lm_head_dtype=serving.lm_head_dtype,
    )
    with torch.inference_mode():
        return _Trial(source, candidate, windows).run()


class _Trial:
    """Both models and the windows they read."""

    def __init__(self, source: Decoder, candidate: Decoder, windows: Sequence[Sequence[int]]) -> None:
        length = min(LENGTH, *(len(window) for window in windows[:WINDOWS]))
        heads = [window[:length] for window in windows[:WINDOWS]]
        self.source, self.candidate = source, candidate
        self.turn = turn_between(source, candidate)
        self.ids = torch.tensor(heads, device=source.device).flatten()
        self.positions = torch.arange(length, device=source.device).repeat(len(heads))
        self.attend = CausalAttention(len(heads))

    def run(self) -> Blame:
        """Errors of all parts, then the shares of those that stand out."""
        source, candidate = self.source, self.candidate
        start, moved_start = source.embed(self.ids), candidate.embed(self.ids)
        stream, whole, errors = start, moved_start, []
        outputs: list[Tensor] = []  # what the candidate's layer makes of the source's stream
        for i in range(len(source.layers)):
            outputs.append(self._back(self._through(candidate, i, self._there(stream))))
            whole = self._through(candidate, i, whole)
            before, stream = stream, self._through(source, i, stream)
            errors.append(_distance(outputs[-1].to(stream.dtype) - before, stream - before))
        shares = {i: self._kl(stream, source, self._onwards(outputs[i], i)) for i in suspects_of(errors)}
        layers = [Part(f"layer {i}", error, shares.get(i)) for i, error in enumerate(errors)]
        moved_start = self._back(moved_start)
        moved = self._onwards(moved_start, -1)
        total = self._kl(stream, candidate, whole)
        embedding_error = _distance(moved_start.to(start.dtype), start)
        if candidate.config.tie_word_embeddings:  # one matrix at both ends
            both = Part(
                "embedding and head", embedding_error, self._kl(stream, candidate, self._there(moved))
            )
            return Blame((both, *layers), total, len(self.ids))
        few = stream[:_ROWS]
        head_error = _distance(self._logits_of(candidate, self._there(few)), self._logits_of(source, few))
        embedding = Part("embedding", embedding_error, self._kl(stream, source, moved))
        head = Part("head", head_error, self._kl(stream, candidate, self._there(stream)))
        return Blame((embedding, *layers, head), total, len(self.ids))

    def _there(self, hidden: Tensor) -> Tensor:
        """The source's stream in the candidate's basis."""
        return hidden if self.turn is None else (hidden.float() @ self.turn).to(hidden.dtype)

    def _back(self, hidden: Tensor) -> Tensor:
        """The candidate's stream in the source's basis."""
        return hidden if self.turn is None else hidden.float() @ self.turn.T

    def _through(self, model: Decoder, index: int, hidden: Tensor) -> Tensor:
        rope = model.rope(self.positions)
        return model.layers[index](hidden.to(model.dtype), rope, self.attend)

    def _onwards(self, hidden: Tensor, index: int) -> Tensor:
        """The stream after layer `index` (-1: the embedding), through the source's layers behind it."""
        for i in range(index + 1, len(self.source.layers)):
            hidden = self._through(self.source, i, hidden)
        return hidden

    def _kl(self, stream: Tensor, model: Decoder, hidden: Tensor) -> float:
        """Mean KL from the source at the end of its own stream to `model`'s end at the end of `hidden`."""
        ours = self._logits(self.source, stream)
        theirs = self._logits(model, hidden)
        scored = fidelity.compare(lambda _: ours, lambda _: theirs, [self.ids.tolist()])
        return float(next(scored).kl.double().mean())

    def _logits(self, model: Decoder, hidden: Tensor) -> Iterator[Tensor]:
        for rows in torch.split(hidden, _ROWS):
            yield self._logits_of(model, rows)

    @staticmethod
    def _logits_of(model: Decoder, hidden: Tensor) -> Tensor:
        return model.logits(model.normed(hidden.to(model.dtype)))


def _distance(tensor: Tensor, reference: Tensor) -> float:
    """||tensor - reference|| / ||reference||."""
    reference = reference.double()
    return float(torch.linalg.vector_norm(tensor.double() - reference) / torch.linalg.vector_norm(reference))
