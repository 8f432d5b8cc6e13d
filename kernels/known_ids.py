"""The tokens of a step of which some were sampled by the step before: those are on the device alone."""

from __future__ import annotations

import torch
from torch import Tensor


def put_known_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> None:
    """Writes what is in last [L] at a token's lane [T] over the negative ones of token_ids [T] int64.

    What is negative there too (the row it was sampled from held NaN) becomes 0: the sequence has ended.
    """
    token_ids.copy_(torch.where(token_ids < 0, last[lanes].clamp(min=0), token_ids))
