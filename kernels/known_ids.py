"""Tokens that one step samples and the next one takes in, while the host has not heard of them yet."""

from __future__ import annotations

import torch
from torch import Tensor


def put_known_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> None:
    """Writes what is in last [L] at a token's lane [T] over the negative ones of token_ids [T] int64.

    What is negative there too (the row it was sampled from held NaN) becomes 0: the sequence has ended.
    """
    token_ids.copy_(torch.where(token_ids < 0, last[lanes].clamp(min=0), token_ids))


def keep_ids(ids: Tensor, lanes: Tensor, last: Tensor, host: Tensor) -> None:
    """Writes sampled ids [S] int64 to last [L] at their lanes [S], and the first H to host [H].

    On a GPU `host` is pinned memory, which has them when the stream has come so far.
    """
    last.index_copy_(0, lanes, ids)
    host.copy_(ids[: len(host)], non_blocking=True)
