"""Float8 dialects: HF and DeepSeek `fp8`, and `fbgemm_fp8`.

All hold `weight` as float8 e4m3fn [N, K] and a scale that multiplies it, whatever it is called:

    fp8         weight_scale_inv [ceil(N/128), ceil(K/128)], or one number for the weight where there is no
                weight_block_size; activations dynamic, or static with activation_scale (vLLM: weight_scale,
                input_scale). Scales of `scale_fmt: ue8m0` are exponents, e8m0 or plain bytes: 2^(b - 127)
    fbgemm_fp8  weight_scale [N, 1]; activations per token

Blocks of 128 x 128 and one number per row or weight have schemes. One number for a weight becomes that number
for each of its rows, so q, k and v keep their own. A token's scale is its absolute maximum / 448; fbgemm
bounds that maximum (`activation_scale_ub`) and so clips larger inputs, which is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qinfer.checkpoint.stored import Folder, Stored
from qinfer.errors import UnsupportedModelError
from qinfer.quant import Dense, Scheme, TensorSpec, W8A8Fp8, W8A8Fp8Block, W8A8Fp8Static
from qinfer.quant.w8a8_fp8_block import BLOCK

METHOD = "fp8"
FBGEMM = "fbgemm_fp8"
Granularity = Literal["tensor", "channel", "block"]
_EXPONENTS = {"U8": torch.uint8, "F8_E8M0": torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Float8Linear:
    """One float8 weight; `scale` and `input_scale` are the suffixes of its scales in the file."""

    scheme: Scheme
    shape: tuple[int, int]
    granularity: Granularity
    scale: str
    scale_dtype: torch.dtype | None = None  # None: any float
    input_scale: str | None = None
    block: tuple[int, int] = (BLOCK, BLOCK)

    order = None

    def specs(self) -> dict[str, TensorSpec]:
        rows, columns = self.shape
        shapes: dict[Granularity, tuple[int, ...]] = {
            "tensor": (1,),
            "channel": (rows, 1),
            "block": (-(-rows // self.block[0]), -(-columns // self.block[1])),
        }
        specs = {
            "weight": TensorSpec(self.shape, torch.float8_e4m3fn),
            self.scale: TensorSpec(shapes[self.granularity], self.scale_dtype),
        }
        if self.input_scale is not None:
            specs[self.input_scale] = TensorSpec((1,), None)
        return specs

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight, scale = tensors["weight"], tensors[self.scale]
        if scale.dtype is torch.uint8:
            scale = (scale.float() - 127).exp2()
        scale = scale.float()
        if isinstance(self.scheme, Dense):
            return {"weight": weight.float() * self._spread(scale)}
        if isinstance(self.scheme, W8A8Fp8):
            return {"weight": weight, "weight_scale": scale.expand(self.shape[0], 1).contiguous()}
        read = {"weight": weight, "weight_scale": scale}
        if self.input_scale is not None:
            read["input_scale"] = tensors[self.input_scale].float()
        return read

    def dense(self) -> Float8Linear:
        return replace(self, scheme=Dense())

    def _spread(self, scale: Tensor) -> Tensor:
        """The scale of every weight, or what broadcasts to it."""
        if self.granularity != "block":
            return scale
        rows, columns = self.shape
        spread = scale.repeat_interleave(self.block[0], 0)[:rows]
        return spread.repeat_interleave(self.block[1], 1)[:, :columns]


def survey(raw: Mapping[str, Any], folder: Folder) -> dict[str, Stored]:
    """Every linear whose weight is float8; without blocks, a scale's shape says whether it is one per row.

    Raises UnsupportedModelError for another float8 than e4m3.
    """
    _refuse_other_floats(folder)
    block = tuple(map(int, raw.get("weight_block_size") or ()))
    if block and len(block) != 2:
        raise UnsupportedModelError(f"weight_block_size {list(block)} is not supported; two numbers are")
    is_static = raw.get("activation_scheme", "dynamic") == "static"
    stored: dict[str, Stored] = {}
    for module, shape in float8_linears(folder).items():
        scale = _first(folder, module, "weight_scale_inv", "weight_scale")
        linear = Float8Linear(
            Dense(),
            shape,
            "block" if block else _one_or_one_per_row(folder, f"{module}.{scale}", shape),
            scale,
            _EXPONENTS.get(_dtype(folder, f"{module}.{scale}")),
            _first(folder, module, "activation_scale", "input_scale") if is_static else None,
            (block[0], block[1]) if block else (BLOCK, BLOCK),
        )
        stored[module] = replace(linear, scheme=scheme_for(linear))
    return stored


def survey_fbgemm(raw: Mapping[str, Any], folder: Folder) -> dict[str, Stored]:
    """Every linear whose weight is float8, with a scale per row."""
    _refuse_other_floats(folder)
    return {
        module: Float8Linear(W8A8Fp8(), shape, "channel", "weight_scale")
        for module, shape in float8_linears(folder).items()
    }


def scheme_for(linear: Float8Linear) -> Scheme:
    """The scheme that means the same; Dense where none does."""
    if linear.granularity == "block":
        return W8A8Fp8Block() if linear.block == (BLOCK, BLOCK) and linear.input_scale is None else Dense()
    if linear.input_scale is None:
        return W8A8Fp8()
    return W8A8Fp8Static() if linear.granularity == "tensor" else Dense()


def float8_linears(folder: Folder) -> dict[str, tuple[int, int]]:
    """Those linears whose weight is float8 e4m3, by full name, with their shapes."""
    return {
        module: shape
        for module, shape in folder.linears().items()
        if _dtype(folder, f"{module}.weight") == "F8_E4M3"
    }


def _refuse_other_floats(folder: Folder) -> None:
    for module in folder.linears():
        dtype = _dtype(folder, f"{module}.weight")
        if dtype.startswith("F8_") and dtype != "F8_E4M3":
            raise UnsupportedModelError(
                f"{module}.weight is {dtype}, which is not supported; float8 e4m3fn (F8_E4M3) is"
            )


def _one_or_one_per_row(folder: Folder, name: str, shape: tuple[int, int]) -> Granularity:
    """What the shape of a scale says."""
    found = folder.headers[name].shape if folder.has(name) else ()
    return "channel" if [length for length in found if length != 1] == [shape[0]] else "tensor"


def _dtype(folder: Folder, name: str) -> str:
    return folder.headers[name].dtype if folder.has(name) else ""


def _first(folder: Folder, module: str, *suffixes: str) -> str:
    """The first of these tensors that is there; the first, whose absence is then reported, if none is."""
    return next((suffix for suffix in suffixes if folder.has(f"{module}.{suffix}")), suffixes[0])
