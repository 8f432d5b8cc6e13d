"""Turns the weights of one group, linears that share their input, into what the file will hold.

Three steps: a range for every row and group of columns, rounding to the grid that it makes (to nearest, or by
GPTQ, for which the whole group shares one factorization), and packing. What GPTQ gives lies on the grid, so
packing finds its codes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from qinfer.calibrate.gptq import gptq
from qinfer.calibrate.gram import Inputs
from qinfer.calibrate.grid import Grid
from qinfer.calibrate.ranges import (
    ErrorOf,
    full_ranges,
    input_weighted_error,
    output_error,
    search_ranges,
    weight_error,
)
from qinfer.errors import CheckpointError
from qinfer.quant import W4A16, Dense, Ranges, Scheme, W8A8Fp8Block, W8A8Fp8Static, quantize_named
from qinfer.quant.w8a8_fp8_block import BLOCK


@dataclass(frozen=True)
class HowToRound:
    """Scheme of a group, what its ranges are judged by, and whether GPTQ rounds; `storage` is of scales."""

    scheme: Scheme
    ranges: str
    by_gptq: bool
    storage: torch.dtype


@dataclass
class RoundedGroup:
    """File tensors of each module, what searched ranges left of the error and cut off, and GPTQ's note."""

    linears: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    clipping: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)
    note: str = ""


def round_group(
    weights: Mapping[str, Tensor], inputs: Inputs | None, how: HowToRound, prefix: str
) -> RoundedGroup:
    """Quantizes `weights`, float32 [N, K] by relative module name; `prefix` is the layer's, for messages.

    `inputs` may be None where neither GPTQ, nor the ranges, nor a static scale look at them. Raises
    CheckpointError naming a weight that holds NaN or infinity, or inputs that do.
    """
    result, scheme = RoundedGroup(), how.scheme
    if inputs is not None:
        _look(inputs, weights, how)
    if isinstance(scheme, Dense):
        for module, weight in weights.items():
            result.linears[module] = quantize_named(
                scheme, f"{prefix}{module}.weight", weight, dtype=how.storage
            )
        return result
    if how.by_gptq:
        assert inputs is not None
        _check_inputs(weights, inputs, prefix)
    ranges: dict[str, Ranges] = {}
    for module, weight in weights.items():
        ranges[module], share = _ranges(weight, inputs, how)
        if share is not None:
            result.clipping[module] = share
            result.clipped[module] = _share_beyond(weight, ranges[module])
    if isinstance(scheme, W8A8Fp8Static):
        ranges = dict.fromkeys(ranges, _widest(ranges))
    if how.by_gptq and inputs is not None:
        weights, result.note = _by_gptq(weights, ranges, inputs, how)
    for module, weight in weights.items():
        name = f"{prefix}{module}.weight"
        tensors = quantize_named(scheme, name, weight, ranges[module], dtype=how.storage)
        if isinstance(scheme, W8A8Fp8Static):
            assert inputs is not None
            tensors = scheme.with_input_range(tensors, inputs.absmax)
        result.linears[module] = tensors
    return result


def _look(inputs: Inputs, weights: Mapping[str, Tensor], how: HowToRound) -> None:
    """One pass over the inputs for all that will be asked of them."""
    if isinstance(how.scheme, Dense):
        return inputs.look()
    width = group_width(how.scheme, next(iter(weights.values())).shape[1])
    blocks = width if how.ranges == "output" else None
    inputs.look(gram=how.by_gptq, squares=how.ranges == "imatrix", group_size=blocks)


def group_width(scheme: Scheme, in_features: int) -> int:
    """How many columns of a row share a scale."""
    if isinstance(scheme, W4A16):
        return scheme.group_size
    return BLOCK if isinstance(scheme, W8A8Fp8Block) else in_features


def _ranges(weight: Tensor, inputs: Inputs | None, how: HowToRound) -> tuple[Ranges, float | None]:
    """Ranges [N, groups], and the error of searched ones as a share of the full ranges'."""
    scheme = how.scheme
    width = group_width(scheme, weight.shape[1])
    symmetric = not isinstance(scheme, W4A16) or scheme.symmetric
    if how.ranges == "absmax":
        padded = functional.pad(weight, (0, -weight.shape[1] % width))
        return full_ranges(padded, width, symmetric=symmetric), None
    grid_of = partial(Grid.of, scheme, dtype=how.storage)
    return search_ranges(weight, width, grid_of, _error_of(how.ranges, inputs, width), symmetric=symmetric)


def _share_beyond(weight: Tensor, ranges: Ranges) -> float:
    """Share of weights that lie outside their range."""
    low, high = (x.unsqueeze(-1) for x in ranges)
    groups = weight.view(len(weight), low.shape[1], -1)
    return float(((groups < low) | (groups > high)).float().mean())


def _error_of(ranges: str, inputs: Inputs | None, width: int) -> ErrorOf:
    if ranges == "mse":
        return weight_error
    assert inputs is not None
    if ranges == "imatrix":
        return input_weighted_error(inputs.squares.view(-1, width))
    return output_error(inputs.moments(width))


def _widest(ranges: Mapping[str, Ranges]) -> Ranges:
    """The one symmetric range that holds all."""
    high = torch.stack([torch.maximum(low.abs(), high.abs()).amax() for low, high in ranges.values()]).amax()
    return -high.view(1, 1), high.view(1, 1)


def _by_gptq(
    weights: Mapping[str, Tensor], ranges: Mapping[str, Ranges], inputs: Inputs, how: HowToRound
) -> tuple[dict[str, Tensor], str]:
    joined = torch.cat(list(weights.values()))
    grids = [_rows_of_grid(how, ranges[module], len(weight)) for module, weight in weights.items()]
    zeros = [grid.zero for grid in grids if grid.zero is not None]
    grid = Grid(torch.cat([g.step for g in grids]), torch.cat(zeros) if zeros else None, grids[0].bits)
    rounded = gptq(joined, inputs.gram, grid, group_width(how.scheme, joined.shape[1]))
    parts = rounded.weight.split_with_sizes([len(weight) for weight in weights.values()])
    return dict(zip(weights, parts, strict=True)), rounded.note


def _check_inputs(weights: Mapping[str, Tensor], inputs: Inputs, prefix: str) -> None:
    if not bool(inputs.gram.isfinite().all()):
        names = ", ".join(f"{prefix}{module}" for module in weights)
        raise CheckpointError(f"{names}: the inputs that reach them hold NaN or infinity")


def _rows_of_grid(how: HowToRound, ranges: Ranges, rows: int) -> Grid:
    """The grid of every row, also where rows share one."""
    if isinstance(how.scheme, W8A8Fp8Block):
        high = torch.maximum(ranges[0].abs(), ranges[1].abs())
        blocks = functional.pad(high, (0, 0, 0, -rows % BLOCK)).view(-1, BLOCK, high.shape[1]).amax(1)
        high = blocks.repeat_interleave(BLOCK, 0)[:rows]
        ranges = -high, high
    grid = Grid.of(how.scheme, ranges, how.storage)
    return grid.map(lambda x: x.expand(rows, -1))
