"""A mixture of experts in place of the MLP: each token goes through the few that its router chooses.

    w = softmax(router(x)) over all experts; the k largest, perhaps scaled to a sum of 1
    y = sum over those k of w_e * expert_e(x)                 (Shazeer et al. 2017; Mixtral, Qwen3-MoE)

Each expert is an MLP of the usual kind, quantized like any; the router stays in the model's dtype, for a
choice that flips changes more than any rounding of a weight. On a CPU an expert takes the rows of its tokens.
On a GPU every expert takes all tokens, and those that did not choose it count for nothing: how many did is
never waited for, so the step may be a graph, at num_experts / k times the work.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qinfer import ops
from qinfer.config import ModelConfig
from qinfer.model.linear import Linear
from qinfer.model.parts import Mlp, Tap


class Experts:
    """Router [E, H] and as many MLPs."""

    codes = None  # the router reads numbers

    def __init__(self, config: ModelConfig, router: Tensor, experts: Sequence[Mlp]) -> None:
        self.config = config
        self.router = router
        self.experts = list(experts)
        self.gate_up: Linear = self.experts[0].gate_up  # all have its scheme

    def __call__(self, x: ops.Activations, tap: Tap | None = None) -> ops.Product:
        """x [T, H], normed -> [T, H]; with a tap every expert sees all tokens, as on a GPU."""
        assert isinstance(x, Tensor)
        weights = self.route(x)
        if tap is not None or x.is_cuda:
            return self._everywhere(x, weights, tap)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = weights[:, i].nonzero().flatten()
            if len(rows):
                y = ops.scaled(expert(x[rows])) * weights[rows, i, None]
                out.index_add_(0, rows, y.to(out.dtype))
        return out

    def route(self, x: Tensor) -> Tensor:
        """Weight of each expert for each token, [T, E] in x's dtype; 0 of those that were not chosen."""
        x = x.to(self.router.dtype)  # float32 where one token runs by rows
        scores = F.linear(x, self.router).softmax(-1, dtype=torch.float32)
        top, chosen = scores.topk(self.config.experts_per_token, dim=-1)
        if self.config.renormalize_experts:
            top = top / top.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(1, chosen, top).to(x.dtype)

    def __copy__(self) -> Experts:
        """One whose experts' linears may be replaced without touching these."""
        return Experts(self.config, self.router, [copy.copy(expert) for expert in self.experts])

    def _everywhere(self, x: Tensor, weights: Tensor, tap: Tap | None) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            own = None
            if tap is not None:
                own = _renamed(tap, i)
            y = ops.scaled(expert(x, own)) * weights[:, i, None]
            out += y.to(out.dtype)
        return out


def _renamed(tap: Tap, index: int) -> Tap:
    """The tap under the names of one expert's groups, 'gate_up.3'."""

    def call(group: str, x: Tensor) -> None:
        tap(f"{group}.{index}", x)

    return call
