"""x @ weight.T in the model's own dtype: what the quantized products are measured against."""

from torch import Tensor
from torch.nn import functional


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] of the same dtype -> [T, N]."""
    return functional.linear(x, weight)
