"""The one loop that both searches share: try scales in order, keep the first one that is strictly best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from qinfer.errors import CheckpointError


@dataclass(frozen=True)
class Choice:
    """What a search decided for one mapping; losses are mean squared errors of the module's output."""

    mapping: str
    setting: dict[str, float]  # {"alpha": 0.5} or {"ratio": 0.3, "duo": 1}
    loss: float
    unscaled_loss: float
    scale: Tensor  # [channels of the source], float32


def search_scale(
    where: str,
    mapping: str,
    candidates: Iterable[tuple[dict[str, float], Tensor]],
    loss_of: Callable[[Tensor], float],
) -> Choice:
    """Best of `candidates`, whose first is the identity; later ones win only where strictly better.

    A candidate with a loss that is not finite is passed over. When even the identity's is not finite, the
    weights or the inputs are at fault: raises CheckpointError naming `where` and the cause.
    """
    best: Choice | None = None
    for setting, scale in candidates:
        loss = loss_of(scale)
        if best is None:
            if not math.isfinite(loss):
                raise CheckpointError(
                    f"{where} {mapping}: the error without any scaling is {loss}; "
                    "the layer's weights or the activations that reach it hold NaN or infinity"
                )
            best = Choice(mapping, setting, loss, loss, scale)
        elif loss < best.loss:
            best = Choice(mapping, setting, loss, best.unscaled_loss, scale)
    if best is None:
        raise ValueError("no candidates")
    return best
