"""`write_kv` on the CPU: where a step's tokens go is worked out once, not in each of its layers.

Pages [num_pages, Hkv, PAGE, D] seen flat are rows of D numbers, and a token's head h lies in row
(page * Hkv + h) * PAGE + offset. Writing by such rows is one call for K and one for V: in a step with one
token 12 us a layer, where indexing by page and offset took 36.
"""

import torch
from torch import Tensor

from qinfer.kernels.kv_format import KVPages, store


def slot_rows(slots: Tensor, num_kv_heads: int, page_size: int) -> Tensor:
    """slots [T] of `write_kv`, negative for padding -> flat rows [T * Hkv], heads of a token together."""
    slots = slots.clamp(min=0)
    first = slots // page_size * (num_kv_heads * page_size) + slots % page_size
    heads = torch.arange(num_kv_heads, device=slots.device) * page_size
    return (first.unsqueeze(1) + heads).flatten()


def write_kv_cpu(k: Tensor, v: Tensor, pages: KVPages, rows: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `rows` of the layer's pages, in place."""
    dim = k.shape[2]
    for x, target, scales, scale in pages.halves(k, v):
        numbers, row_scales = store(x, target.dtype, scale)
        if target.element_size() == 1:  # index_copy_ has no fp8; bytes are bytes
            numbers, target = numbers.view(torch.uint8), target.view(torch.uint8)
        target.view(-1, dim).index_copy_(0, rows, numbers.reshape(-1, dim))
        if scales is not None and row_scales is not None:
            scales.view(-1).index_copy_(0, rows, row_scales.flatten())
