"""`qkv_post` of one token on the CPU: bias, norms and rotation of its heads, K and V into their pages.

By rows of NumPy for the reason that `int8_row_cpu` gives: with torch's single ops it took 83 us a layer.
"""

import numpy as np
import torch
from torch import Tensor

from qinfer.kernels.int8_row_cpu import Row
from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.qkv_post import HeadNorms
from qinfer.kernels.write_kv_cpu import write_kv_cpu


def qkv_row(
    qkv: Tensor,
    pages: KVPages,
    rows: Tensor,
    *,
    rotation: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """qkv float32 [1, N], whose memory is used again, -> queries [1, Hq, D] in `dtype`.

    `rows` of the pages as `write_kv_cpu` takes them; cos and signed sin [1, R]; bias [N].
    """
    num_kv_heads, _, dim = pages.k.shape[1:]
    row: Row = qkv.numpy()
    if bias is not None:
        row += bias.float().numpy()
    heads = row.reshape(-1, dim)
    num_q_heads = len(heads) - 2 * num_kv_heads
    if norms is not None:
        _norm(heads[:num_q_heads], norms.q, norms)
        _norm(heads[num_q_heads:-num_kv_heads], norms.k, norms)
    if rotation is not None:
        _turn(heads[:-num_kv_heads], *(angles.float().numpy() for angles in rotation))
    # a page of 8 bits is made of the numbers as they are, others round once, all heads in one call
    stored = qkv.view(1, -1, dim) if pages.k.element_size() == 1 else qkv.view(1, -1, dim).to(pages.k.dtype)
    q, k, v = stored.split_with_sizes((num_q_heads, num_kv_heads, num_kv_heads), 1)
    write_kv_cpu(k, v, pages, rows)
    return q.to(dtype)


def _norm(heads: Row, weight: Tensor, norms: HeadNorms) -> None:
    mean = np.einsum("nd,nd->n", heads, heads) / heads.shape[1]
    heads *= (mean + np.float32(norms.eps))[:, None] ** -0.5
    heads *= (weight.float() + norms.offset).numpy()


def _turn(heads: Row, cos: Row, sin: Row) -> None:
    """`rope` in place."""
    rotary_dim = cos.shape[-1]
    turning = heads[:, :rotary_dim].reshape(len(heads), 2, rotary_dim // 2)  # views all
    swapped = turning[:, ::-1] * sin.reshape(2, -1)
    turning *= cos.reshape(2, -1)
    turning += swapped
