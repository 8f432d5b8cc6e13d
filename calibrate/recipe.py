"""From what was asked ("awq") to what will be done: scheme, method, ranges and group size, before any work.

A preset names a scheme and its method. A scheme can be asked for by name, with the method that suits it or
another that does: SmoothQuant moves outliers out of activations, so it needs a scheme that quantizes them;
AWQ weighs the errors of weights alone, so it needs one that does not; GPTQ rounds any weights, after either
or by itself. A group size that does not divide every input width is lowered for the whole model
(128 -> 64 -> 32), and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qinfer.calibrate.ranges import RANGES
from qinfer.checkpoint.names import layer_modules, linear_shape
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.quant import (
    SCHEMES,
    W4A16,
    ActivationFormat,
    Dense,
    Scheme,
    W8A8Fp8Block,
    W8A8Fp8Static,
    scheme_by_name,
    settle_group_size,
)
from qinfer.quant.w8a8_fp8_block import BLOCK

METHODS = ("rtn", "smoothquant", "awq", "gptq", "smoothquant+gptq", "awq+gptq")
PRESETS: Mapping[str, tuple[str, str]] = {
    "int8": ("w8a8-int8", "smoothquant"),
    "fp8": ("w8a8-fp8", "rtn"),
    "awq": ("w4a16", "awq"),
    "gptq": ("w4a16", "gptq"),
}
_USUAL_METHOD = {"w8a8-int8": "smoothquant", "w4a16": "awq"}  # others: rtn
# Of 4 bits; others: absmax. After GPTQ, on text unlike the calibration's, ranges by imatrix left less of the
# error of outputs than ranges by output in each of four linears of SmolLM2-135M (of absmax RTN's error 0.358
# to 0.367, 0.413 to 0.430, 0.716 to 0.723, 0.895 to 0.902).
_USUAL_RANGES = {"awq": "output", "awq+gptq": "imatrix", "gptq": "imatrix"}


class Recipe(NamedTuple):
    """What to do to a model, and sentences for the person who asked."""

    scheme: Scheme
    method: str
    notes: tuple[str, ...]
    ranges: str = "absmax"

    @property
    def needs_text(self) -> bool:
        """Whether activations are looked at; rtn of a dynamic scheme looks at the weights alone."""
        static = self.scheme.activations is ActivationFormat.FP8_STATIC
        return self.method != "rtn" or static or self.ranges in ("imatrix", "output")

    @property
    def transform(self) -> str | None:
        """The method that moves scales between layers before rounding, if any."""
        return next((name for name in ("smoothquant", "awq") if name in self.method), None)

    @property
    def by_gptq(self) -> bool:
        """Whether GPTQ rounds."""
        return self.method.endswith("gptq")


def settle(
    config: ModelConfig,
    scheme: str,
    method: str | None = None,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    ranges: str | None = None,
) -> Recipe:
    """The recipe for a preset ('int8', 'fp8', 'awq', 'gptq') or a scheme's name.

    Raises UserError for an unknown scheme, method or ranges, a pair that makes no sense, an option that the
    scheme does not have, and widths that no group size divides.
    """
    if scheme not in PRESETS and scheme not in SCHEMES:
        known = ", ".join([*PRESETS, *(name for name in SCHEMES if name != Dense.name)])
        raise UserError(f"unknown scheme {scheme!r}; choose one of {known}", "scheme")
    name, usual = PRESETS.get(scheme, (scheme, _USUAL_METHOD.get(scheme, "rtn")))
    if name == Dense.name:
        raise UserError("scheme 'dense' quantizes nothing; choose another", "scheme")
    method = method or usual
    settled = scheme_by_name(name, group_size=group_size, symmetric=symmetric)
    _check_pair(settled, method)
    if not isinstance(settled, W4A16):
        ranges = ranges or "absmax"
        _check_ranges(settled, ranges)
        return Recipe(settled, method, _block_notes(config, settled), ranges)
    ranges = ranges or _USUAL_RANGES.get(method, "absmax")
    _check_ranges(settled, ranges)
    return _with_group_size(config, settled, method)._replace(ranges=ranges)


def _check_pair(scheme: Scheme, method: str) -> None:
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}", "method")
    weight_only = scheme.activations is ActivationFormat.NONE
    if "smoothquant" in method and weight_only:
        raise UserError(
            f"smoothquant moves outliers out of activations, which {scheme.name} does not quantize; "
            "use awq, gptq or rtn",
            "method",
        )
    if "awq" in method and not weight_only:
        raise UserError(
            f"awq is for schemes that quantize weights alone; for {scheme.name} use smoothquant, gptq or rtn",
            "method",
        )


def _check_ranges(scheme: Scheme, ranges: str) -> None:
    if ranges not in RANGES:
        raise UserError(f"unknown ranges {ranges!r}; choose one of {', '.join(RANGES)}", "ranges")
    if ranges != "absmax" and isinstance(scheme, W8A8Fp8Static | W8A8Fp8Block):
        raise UserError(
            f"{scheme.name} has one scale for many rows, so each is the largest weight's: "
            f"ranges {ranges!r} are for schemes with a scale per row or group",
            "ranges",
        )
    if ranges == "output" and not isinstance(scheme, W4A16):
        raise UserError(
            f"ranges 'output' are searched for groups of weights (w4a16), not for rows of {scheme.name}; "
            "choose absmax, mse or imatrix",
            "ranges",
        )


def _block_notes(config: ModelConfig, scheme: Scheme) -> tuple[str, ...]:
    """What other readers will not do with blocks that the model's widths do not fill."""
    shapes = {module: linear_shape(config, module) for module in layer_modules(config)}
    ragged = [module for module, shape in shapes.items() if shape[0] % BLOCK or shape[1] % BLOCK]
    if not isinstance(scheme, W8A8Fp8Block) or not ragged:
        return ()
    return (
        f"blocks of {BLOCK} do not divide the shapes of {', '.join(ragged)}: qinfer runs this on a CPU, but "
        "vLLM and transformers do not load it; w8a8-fp8 fits every width",
    )


def _with_group_size(config: ModelConfig, wanted: W4A16, method: str) -> Recipe:
    widths = {module: linear_shape(config, module)[1] for module in layer_modules(config)}
    size = settle_group_size(widths, wanted.group_size)
    if size == wanted.group_size:
        return Recipe(wanted, method, ())
    bad = ", ".join(f"{module} ({w})" for module, w in widths.items() if w % wanted.group_size)
    note = (
        f"group size {wanted.group_size} does not divide the input width of {bad}; "
        f"using {size} for the whole model"
    )
    return Recipe(W4A16(size, wanted.symmetric), method, (note,))
