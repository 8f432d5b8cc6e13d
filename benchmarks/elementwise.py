"""Row-wise kernels (norms, gated activations, 8-bit codes, split-K sums) against copies and plain torch.

    python benchmarks/elementwise.py [--out benchmarks/results/elementwise-nvidia-h200.json]

Prints the copy bandwidth of this run first, then a table, then one JSON document. Times are medians of graph
replays on random bfloat16. From 1024 rows on, calls rotate over more inputs than the L2 holds and are judged
by their bytes (each input read once, each output written once): against the bandwidth of a copy of 4 GB, and
against torch's copy of as many bytes, rotated and replayed in the same way, for a short kernel's start and
end are a part of its time. Below that a call is judged by its time alone: with inputs in the L2 ("hot"),
where in a model the kernel before has just left them, and rotating ("cold"). "parts 4" are inputs in four
float32 partial sums, as a product that cut its inner dimension leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from graph_timing import L2_TWICE, microseconds
from report import Row, run
from torch import Tensor

from qinfer.kernels import (
    activation,
    activation_triton,
    fused_activation,
    fused_activation_triton,
    fused_norm,
    fused_norm_triton,
    norm,
    norm_triton,
    quantize_per_token,
    quantize_per_token_triton,
)

ROWS = (1, 16, 64, 1024, 4096)
WIDTHS = ((576, 1536), (896, 4864), (2048, 8192), (2560, 9728), (4096, 14336), (8192, 28672))  # hidden, gated
PARTS = 4
EPS = 1e-5


class Case(NamedTuple):
    """One op: its call and the same in plain torch on one set of inputs, and the bytes that it must move."""

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    call: Callable[..., Any]
    plain: Callable[..., Any]
    num_bytes: int


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def cases(rows: int, hidden: int, gated: int) -> Iterator[Case]:
    weight = randn(hidden)
    small, large = rows * hidden, rows * gated

    def pair() -> tuple[Tensor, ...]:
        return randn(rows, hidden), randn(rows, hidden)

    def gate_up() -> tuple[Tensor, ...]:
        return (randn(rows, 2 * gated),)

    def normed(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, residual, weight, EPS)

    yield Case(
        "add_rms_norm", pair, lambda x, r: norm_triton.add_rms_norm(x, r, weight, EPS), normed, 8 * small
    )
    codes = (("int8", quantize_per_token.int8_per_token), ("fp8", quantize_per_token.fp8_per_token))
    for kind, quantize in codes:
        fused = getattr(fused_norm_triton, f"add_rms_norm_{kind}")
        yield Case(
            f"add_rms_norm_{kind}",
            pair,
            lambda x, r, op=fused: op(x, r, weight, EPS),
            lambda x, r, op=quantize: op(normed(x, r)[0]),
            7 * small,
        )
    yield Case("silu_mul", gate_up, activation_triton.silu_mul, activation.silu_mul, 6 * large)
    for kind, quantize in codes:
        yield Case(
            f"silu_mul_{kind}",
            gate_up,
            getattr(fused_activation_triton, f"silu_mul_{kind}"),
            lambda x, op=quantize: op(activation.silu_mul(x)),
            5 * large,
        )
    yield Case(
        "gelu_mul_int8",
        gate_up,
        fused_activation_triton.gelu_mul_int8,
        lambda x: quantize_per_token.int8_per_token(activation.gelu_mul(x)),
        5 * large,
    )
    yield Case(
        "int8_per_token",
        lambda: (randn(rows, gated),),
        quantize_per_token_triton.int8_per_token,
        quantize_per_token.int8_per_token,
        3 * large,
    )
    if rows <= 64:
        yield from cases_of_parts(rows, hidden, gated)


def cases_of_parts(rows: int, hidden: int, gated: int) -> Iterator[Case]:
    """With the split-K sum folded in; plain torch sums first."""
    weight = randn(hidden)
    yield Case(
        f"add_rms_norm_int8 parts {PARTS}",
        lambda: (torch.randn(PARTS, rows, hidden, device="cuda"), randn(rows, hidden)),
        lambda x, r: fused_norm_triton.add_rms_norm_int8(x, r, weight, EPS),
        lambda x, r: fused_norm.add_rms_norm_int8(x, r, weight, EPS),
        (4 * PARTS + 5) * rows * hidden,
    )
    yield Case(
        f"silu_mul_int8 parts {PARTS}",
        lambda: (torch.randn(PARTS, rows, 2 * gated, device="cuda"),),
        fused_activation_triton.silu_mul_int8,
        fused_activation.silu_mul_int8,
        (8 * PARTS + 1) * rows * gated,
    )


@cache
def copy_us(num_bytes: int) -> float:
    """Time of a copy that reads and writes `num_bytes` in all."""
    size = num_bytes // 2
    count = max(2, min(32, L2_TWICE // num_bytes + 1))
    pairs = [torch.randint(256, (2, size), dtype=torch.uint8, device="cuda").unbind(0) for _ in range(count)]
    return microseconds([lambda a=a, b=b: b.copy_(a) for a, b in pairs] * max(1, 16 // count))


def measure(case: Case, rows: int) -> dict[str, Any]:
    """Times of a case in microseconds, and the bandwidth it reaches where that says something."""
    count = max(2, min(32, L2_TWICE // case.num_bytes + 1))
    sets = [case.inputs() for _ in range(count)]
    cold = microseconds([lambda s=s: case.call(*s) for s in sets] * max(1, 16 // count))
    found = {"cold_us": cold, "torch_us": microseconds([lambda s=s: case.plain(*s) for s in sets[:4]])}
    if rows < 1024:
        found["hot_us"] = microseconds([lambda: case.call(*sets[0])] * 24)
    else:
        found["tb_s"] = case.num_bytes / cold / 1e6
        found["equal_copy_us"] = copy_us(case.num_bytes)
    return found


def summary(found: dict[str, Any], copy: float) -> str:
    times = f"{found['cold_us']:7.2f} us  {found['torch_us'] / found['cold_us']:5.1f}x torch"
    if "hot_us" in found:
        return f"{times}  hot {found['hot_us']:5.2f} us"
    of_equal = found["equal_copy_us"] / found["cold_us"]
    return f"{times}  {found['tb_s'] / copy:5.1%} of copy  {of_equal:5.1%} of an equal one"


def calls() -> Iterator[Callable[[], Any]]:
    """Each case once."""
    for rows in ROWS:
        for hidden, gated in WIDTHS:
            for case in cases(rows, hidden, gated):
                yield lambda case=case: case.call(*case.inputs())


def measured(copy: float) -> Iterator[Row]:
    for rows in ROWS:
        for hidden, gated in WIDTHS:
            for case in cases(rows, hidden, gated):
                found = measure(case, rows)
                width = hidden if "norm" in case.name else gated
                line = f"{case.name:26} {rows:5} x {width:5}: {summary(found, copy)}"
                yield {"op": case.name, "rows": rows, "width": width, **found}, line


if __name__ == "__main__":
    run(__doc__, calls, measured)
