# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What the kernels with one task per warp share (Gluon, the layer of Triton below its tiles).

Plain Triton gives all warps of a program the same task: they load, multiply and store in step, and the tensor
cores wait meanwhile. Here one warp copies ahead and two groups of four warps multiply, out of step.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.9 has new names for copies between memory and shared memory, a group's barrier, and another view.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_buffer = gl.shared_memory_descriptor
seen_as = getattr(_buffer, "reinterpret", None) or _buffer._reinterpret

FLAT = gl.NVMMASharedLayout(0, 32, rank=2)  # nothing swizzled


@gluon.jit
def wait_for_previous(EARLY: gl.constexpr):
    """Waits until the kernel in front has ended, where this one may start before (programmatic launch)."""
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def tell_next(EARLY: gl.constexpr):
    """Lets the next kernel start once all programs have come here."""
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def fill_buffers(copy_weight: gl.constexpr, weight, copy_tokens: gl.constexpr, tokens, empty, steps,
                 STAGES: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """The copying warp of a product: fills the next buffers as soon as all groups have emptied them.

    `copy_weight` and `copy_tokens` are called with step, buffer and what their tuple has. With EARLY the
    weight of the first steps comes while the kernel in front still works on the tokens.
    """
    soon = gl.minimum(steps, STAGES)
    for i in range(soon):
        copy_weight(i, i, *weight)
    wait_for_previous(EARLY)
    for i in range(soon):
        copy_tokens(i, i, *tokens)
    for i in range(soon, steps):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        copy_weight(i, stage, *weight)
        copy_tokens(i, stage, *tokens)


def descriptor_type(element: str, block: list[int]) -> str:
    """How a signature spells the type of a `descriptor` of "i8", "fp8e4nv", "bf16", "fp16" or "i32"."""
    bits = {"bf16": 16, "fp16": 16, "i32": 32}.get(element, 8)
    return f"tensordesc<{element}{block},{_layout(block, bits)!r}>"


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Of a matrix, for tiles that the tensor cores can read: up to 128 bytes of a row swizzled."""
    return TensorDescriptor.from_tensor(tensor, block, _layout(block, 8 * tensor.element_size()))


def _layout(block: list[int], bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, block[1] * bits // 8), bits, rank=2)


def flat_descriptor_type(element: str, block: list[int]) -> str:
    """How a signature spells the type of a `flat_descriptor` of "i32"."""
    return f"tensordesc<{element}{block},{FLAT!r}>"


def flat_descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Of a matrix of int32, for blocks that lie in shared memory row after row; for threads to read."""
    return TensorDescriptor.from_tensor(tensor, block, FLAT)
