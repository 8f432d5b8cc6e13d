"""The tokens of a step of which some were sampled by the step before: those are on the device alone."""

from __future__ import annotations

import torch
from torch import Tensor


def known_ids(token_ids: Tensor, last: Tensor, lanes: Tensor) -> Tensor:
    """token_ids [T] int64, and in place of negative ones what is in last [L] at the token's lane [T] -> [T].

    What is negative there too (the row it was sampled from held NaN) becomes 0: the sequence has ended.
    """
    return torch.where(token_ids < 0, last[lanes].clamp(min=0), token_ids)
