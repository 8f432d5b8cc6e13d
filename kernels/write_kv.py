"""Writes a step's K and V into their pages, in the pages' own number format.

Every token has a slot: page * PAGE + offset. A negative slot is padding; it lands in page 0, which no
sequence owns, because an index of -1 would silently be the last page's last slot.
"""

from __future__ import annotations

from torch import Tensor

from qinfer.kernels.kv_format import KVPages, store


def write_kv(k: Tensor, v: Tensor, pages: KVPages, slots: Tensor) -> None:
    """Stores k, v [T, Hkv, D] at `slots` [T] int64 of the layer's pages, in place."""
    size = pages.k.shape[2]
    slots = slots.clamp(min=0)
    page, offset = slots // size, slots % size
    for x, target, scales, scale in pages.halves(k, v):
        numbers, row_scales = store(x, target.dtype, scale)
        target[page, :, offset] = numbers
        if scales is not None and row_scales is not None:
            scales[page, :, offset] = row_scales
