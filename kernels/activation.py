"""The gated activations of a decoder's MLP: act(gate) * up, with both halves in one tensor.

Gate and up come from one matrix product, [T, 2 I]: the gate first, then up (Shazeer 2020, GLU variants).
"""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up [T, 2 I] -> [T, I] in its dtype (Llama, Qwen, Phi)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _times(F.silu(gate), up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up by the tanh formula: gate_up [T, 2 I] -> [T, I] in its dtype (Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _times(F.gelu(gate, approximate="tanh"), up)


def _times(activation: Tensor, up: Tensor) -> Tensor:
    """activation * up, in activation's memory: a third of the time goes into touching new memory.

    Where a gradient flows (calibration's, to choose bits by layer) autograd needs the activation itself.
    """
    return activation * up if activation.requires_grad else activation.mul_(up)
