"""From what was asked ("awq") to what will be done: scheme, method and group size, settled before any work.

A preset names a scheme and its method. A scheme can be asked for by name, with the method that suits it or
another that does: SmoothQuant moves outliers out of activations, so it needs a scheme that quantizes them;
AWQ weighs the errors of weights alone, so it needs one that does not. A group size that does not divide every
input width is lowered for the whole model (128 -> 64 -> 32), and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from qinfer.checkpoint.names import layer_modules, linear_shape
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.quant import (
    SCHEMES,
    W4A16,
    ActivationFormat,
    Dense,
    Scheme,
    scheme_by_name,
    settle_group_size,
)

METHODS = ("rtn", "smoothquant", "awq")
PRESETS: Mapping[str, tuple[str, str]] = {
    "int8": ("w8a8-int8", "smoothquant"),
    "fp8": ("w8a8-fp8", "rtn"),
    "awq": ("w4a16", "awq"),
}
_USUAL_METHOD = {"w8a8-int8": "smoothquant", "w8a8-fp8": "rtn", "w8a16-int8": "rtn", "w4a16": "awq"}


class Recipe(NamedTuple):
    """What to do to a model, and sentences for the person who asked."""

    scheme: Scheme
    method: str
    notes: tuple[str, ...]

    @property
    def needs_text(self) -> bool:
        """Whether the method looks at activations; rtn looks at the weights alone."""
        return self.method != "rtn"


def settle(
    config: ModelConfig,
    scheme: str,
    method: str | None = None,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
) -> Recipe:
    """The recipe for a preset ('int8', 'fp8', 'awq') or a scheme's name.

    Raises UserError for an unknown scheme or method, a pair that makes no sense, an option that the scheme
    does not have, and widths that no group size divides.
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
        return Recipe(settled, method, ())
    return _with_group_size(config, settled, method)


def _check_pair(scheme: Scheme, method: str) -> None:
    if method not in METHODS:
        raise UserError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}", "method")
    weight_only = scheme.activations is ActivationFormat.NONE
    if method == "smoothquant" and weight_only:
        raise UserError(
            f"smoothquant moves outliers out of activations, which {scheme.name} does not quantize; "
            "use awq or rtn",
            "method",
        )
    if method == "awq" and not weight_only:
        raise UserError(
            f"awq is for schemes that quantize weights alone; for {scheme.name} use smoothquant or rtn",
            "method",
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
