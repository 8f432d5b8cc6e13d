"""One typed function per op; with `backend`, the only importer of kernels.

Each op has one meaning in plain torch (qinfer/kernels/<op>.py). Where a device has something faster that
gives the same result, the choice is made here, by shape and by rules that were measured. On a GPU that is a
Triton kernel, the meaning's twin, and `backend` decides between the two.

Others take ops from here, not from the files below. In those, kernels go by names with an underscore, since
an op has the name of its kernel.
"""

from qinfer.kernels.gated_product import TURN
from qinfer.kernels.int8_row_cpu import Int8Row
from qinfer.kernels.kv_format import KVPages
from qinfer.kernels.paged_attention import Geometry, PagedBatch
from qinfer.kernels.qkv_post import HeadNorms
from qinfer.kernels.qkv_row_cpu import qkv_row
from qinfer.ops.attending import (
    Groups,
    attention,
    group_rows,
    kv_dtype,
    kv_places,
    paged_attention,
    qkv_post,
    write_kv,
)
from qinfer.ops.cpu import cpu_paths
from qinfer.ops.eight_bit import (
    fp8_per_group,
    fp8_per_token,
    fp8_static,
    gated_product,
    int8_per_token,
    pack_w8a8_fp8,
    pack_w8a8_fp8_block,
    pack_w8a8_int8,
    w8a8_fp8,
    w8a8_fp8_block,
    w8a8_fp8_static,
    w8a8_int8,
)
from qinfer.ops.elementwise import gated_to, gelu_mul, rope, rope_angles, silu_mul
from qinfer.ops.forms import Activations, Codes, Parts, Product, as_row, is_int8_row, scaled
from qinfer.ops.norms import add_rms_norm, add_rms_norm_to, rms_norm, rms_norm_to
from qinfer.ops.sampling import (
    apply_penalties,
    draw,
    filter_logits,
    greedy,
    sample,
    token_counts,
    token_logprobs,
)
from qinfer.ops.steps import bring, keep_ids, put_known_ids
from qinfer.ops.weight_only import (
    dense,
    pack_w4a16,
    pack_w8a16_fp8,
    pack_w8a16_int8,
    w4a16,
    w8a16_fp8,
    w8a16_int8,
)

__all__ = [
    "TURN",
    "Activations",
    "Codes",
    "Geometry",
    "Groups",
    "HeadNorms",
    "Int8Row",
    "KVPages",
    "PagedBatch",
    "Parts",
    "Product",
    "add_rms_norm",
    "add_rms_norm_to",
    "apply_penalties",
    "as_row",
    "attention",
    "bring",
    "cpu_paths",
    "dense",
    "draw",
    "filter_logits",
    "fp8_per_group",
    "fp8_per_token",
    "fp8_static",
    "gated_product",
    "gated_to",
    "gelu_mul",
    "greedy",
    "group_rows",
    "int8_per_token",
    "is_int8_row",
    "keep_ids",
    "kv_dtype",
    "kv_places",
    "pack_w4a16",
    "pack_w8a8_fp8",
    "pack_w8a8_fp8_block",
    "pack_w8a8_int8",
    "pack_w8a16_fp8",
    "pack_w8a16_int8",
    "paged_attention",
    "put_known_ids",
    "qkv_post",
    "qkv_row",
    "rms_norm",
    "rms_norm_to",
    "rope",
    "rope_angles",
    "sample",
    "scaled",
    "silu_mul",
    "token_counts",
    "token_logprobs",
    "w4a16",
    "w8a8_fp8",
    "w8a8_fp8_block",
    "w8a8_fp8_static",
    "w8a8_int8",
    "w8a16_fp8",
    "w8a16_int8",
    "write_kv",
]
