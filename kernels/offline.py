"""A kernel as one of its launches would compile it: what a look at the machine code needs, without a GPU.

Modules of kernels name theirs in `offline_variants()`, so that a test can compile each for a GPU that is not
there and read the instructions: whether registers spill, whether the tensor cores are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """`signature`: types of the arguments that are no constants ("*bf16", "i32"); pointers are aligned."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]  # num_warps, num_stages, launch_pdl
    aligned: tuple[str, ...] = ()  # integers that 16 divides
    wants_tensor_cores: bool = False
