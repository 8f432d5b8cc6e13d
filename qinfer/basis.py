"""The basis in which a candidate keeps its residual stream, found by looking at its ends.

A checkpoint with rotations merged in computes the same function of a stream that is turned by an orthogonal
matrix, and says so nowhere that can be relied on. But the matrix shows: the candidate's embedding is the
source's times it, and so is the head, once the gains of the final norms are counted in. It is found by
orthogonal Procrustes (Schoenemann 1966), from the embedding, or where that fits neither as it is nor turned,
because it is damaged, from the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.model.decoder import Decoder

_FITS = 0.5  # relative distance; unrelated matrices are 0.8 apart at the least, turned by what fits best
_ROWS_PER_COLUMN = 4  # tokens that are looked at: more would not make it more certain


def turn_between(source: Decoder, candidate: Decoder) -> Tensor | None:
    """R [H, H] float32 such that the candidate's stream is the source's times R; None where they are alike.

    None too where neither end tells: then both are damaged, or the models are not related.
    """
    for end in (_embedding, _head):
        ours, theirs = end(source), end(candidate)
        if _distance(ours, theirs) < _FITS:
            return None
        turn = _procrustes(ours, theirs)
        if _distance(ours @ turn, theirs) < _FITS:
            return turn.float()
    return None


def _embedding(model: Decoder) -> Tensor:
    return _some_rows(model.embedding)


def _head(model: Decoder) -> Tensor:
    """Rows of the head [n, H] times the gain of the norm before it, whatever the head is stored as."""
    gain = model.norm.double() + model.config.norm_offset
    unit = torch.eye(len(gain), device=model.device, dtype=model.dtype)
    return _some_rows(model.head(unit)[:, : model.config.vocab_size].T) * gain


def _some_rows(matrix: Tensor) -> Tensor:
    step = max(1, len(matrix) // (_ROWS_PER_COLUMN * matrix.shape[1]))
    return matrix[::step].double()


def _procrustes(ours: Tensor, theirs: Tensor) -> Tensor:
    """The orthogonal R that brings ours @ R nearest to theirs."""
    left, _, right = torch.linalg.svd(ours.T @ theirs)
    return torch.mm(left, right)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, NaN where either is no number."""
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))
