"""The gated activations of a decoder's MLP: act(gate) * up, with both halves in one tensor.

Gate and up come from one matrix product, [T, 2 I]: the gate first, then up (Shazeer 2020, GLU variants). Or
in *turns*, so many columns of the gate, then as many of up, and so on: as `gated_product` takes them.
"""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor, turn: int | None = None) -> Tensor:
    """silu(gate) * up: gate_up [T, 2 I], in turns of `turn` columns -> [T, I] in its dtype (Llama, Qwen)."""
    gate, up = _halves(gate_up, turn)
    return _times(F.silu(gate), up)


def gelu_mul(gate_up: Tensor, turn: int | None = None) -> Tensor:
    """gelu(gate) * up by the tanh formula: gate_up [T, 2 I] -> [T, I] in its dtype (Gemma)."""
    gate, up = _halves(gate_up, turn)
    return _times(F.gelu(gate, approximate="tanh"), up)


def _halves(gate_up: Tensor, turn: int | None) -> tuple[Tensor, Tensor]:
    if turn is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up
    turns = gate_up.view(*gate_up.shape[:-1], gate_up.shape[-1] // (2 * turn), 2, turn)
    return turns[..., 0, :].flatten(-2), turns[..., 1, :].flatten(-2)


def _times(activation: Tensor, up: Tensor) -> Tensor:
    """activation * up, in activation's memory: a third of the time goes into touching new memory.

    Where a gradient flows (calibration's, to choose bits by layer) autograd needs the activation itself.
    """
    return activation * up if activation.requires_grad else activation.mul_(up)
