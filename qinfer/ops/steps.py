"""What goes from the host into a step, from step to step, and from a step to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer import backend
from qinfer.kernels import arrivals as _arrivals
from qinfer.kernels import known_ids as _known_ids


def bring(numbers: Tensor, target: Tensor, rows: int, width: int, columns: int) -> None:
    """Copies numbers [N] int64 to the beginning of `target`: of the first [rows, width] only `columns`.

    To a GPU from pinned memory, which must stay as it is until the stream has come so far.
    """
    if target.is_cuda:
        return backend.run_in_place(_copied_target, _arrivals.bring, numbers, target, rows, width, columns)
    _arrivals.bring(numbers, target, rows, width, columns)


def _copied_target(numbers: Tensor, target: Tensor, *rest: int) -> backend.Rehearsal:
    copy = target.clone()
    return backend.Rehearsal((numbers, copy, *rest), copy, lambda: target)


def put_known_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> None:
    """Writes what is in last [L] at a token's lane [T] over the negative ones of token_ids [T] int64.

    What is negative there too becomes 0.
    """
    if token_ids.is_cuda:
        return backend.run_in_place(_copied_ids, _known_ids.put_known_ids, token_ids, last, lanes)
    _known_ids.put_known_ids(token_ids, last, lanes)


def keep_ids(ids: Tensor, lanes: Tensor, last: Tensor, host: Tensor) -> None:
    """Writes sampled ids [S] int64 to last [L] at their lanes [S], and the first H to host [H].

    Of a GPU's ids `host` is pinned memory, which has them when the stream has come so far.
    """
    if ids.is_cuda:
        return backend.run_in_place(_copied_last, _known_ids.keep_ids, ids, lanes, last, host)
    _known_ids.keep_ids(ids, lanes, last, host)


def _copied_last(ids: Tensor, lanes: Tensor, last: Tensor, host: Tensor) -> backend.Rehearsal:
    copies = last.clone(), host.clone()

    def actual() -> tuple[Tensor, Tensor]:
        torch.cuda.synchronize(ids.device)
        return last, host

    return backend.Rehearsal((ids, lanes, *copies), copies, actual)


def _copied_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> backend.Rehearsal:
    copy = token_ids.clone()
    return backend.Rehearsal((copy, last, lanes), copy, lambda: token_ids)
