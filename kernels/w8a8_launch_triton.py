"""How products of 8-bit codes are launched: what is the same for scales of rows and for scales of blocks.

Each has two kernels. One of plain Triton is for few tokens, where memory is what limits: small tiles, and K
may be cut, which leaves float32 sums of its shares for another kernel to add (split_k_triton.py). One of
Gluon, where each warp has one task, is for many tokens; a table's entry with STAGES asks for it.

The weight lies in panels (panels.py), so that a tile is one run of memory. Both operands go from memory to
shared memory by the tensor memory accelerator (descriptors) and from there to the tensor cores, which want
8-bit operands along K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qinfer.kernels.offline import Variant
from qinfer.kernels.panels import WIDTH
from qinfer.kernels.rows_triton import MEASURED, table_of
from qinfer.kernels.split_k_triton import (
    check,
    launch_options,
    num_multiprocessors,
    same_code,
    sum_of_parts,
)
from qinfer.kernels.tiles import Declined, Formula, Tile, tile
from qinfer.kernels.w8a8_warps_triton import PIECE
from qinfer.kernels.warps_triton import descriptor, descriptor_type


@dataclass(frozen=True)
class Product:
    """codes [M, K] times a weight in panels, both with scales, plus a bias [N] -> [M, N].

    `by_tile` and `by_warp` are the kernels, `formula` names tiles where nothing was measured, and `strides`
    are those of the activations' scale as the kernels take them.
    """

    by_tile: Any
    by_warp: Any
    formula: Formula
    strides: Callable[[Tensor], Sequence[int]]

    def __call__(
        self,
        op: str,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        in_parts: bool = False,
    ) -> Tensor:
        """The product in `dtype`, with the tile that `op`'s table has; declines a weight in rows.

        in_parts: where the tile cuts K, float32 [S, M, N] is returned, which the next kernel adds up over S.
        """
        entry = self.entry(op, codes, weight, dtype, in_parts)
        return self.run(entry, codes, scale, weight, weight_scale, dtype, bias, in_parts)

    def entry(self, op: str, codes: Tensor, weight: Tensor, dtype: torch.dtype, in_parts: bool) -> Tile:
        """The tile of a call; declines a weight in rows."""
        if weight.dim() != 3:
            raise Declined(f"a weight {list(weight.shape)} in rows; the kernel reads panels")
        m, k, n = max(1, len(codes)), codes.shape[1], weight.shape[1]
        check(codes, n, dtype)
        if dtype is torch.float32:  # twice the shared memory for results: only the smaller tiles leave it
            return self.formula(min(m, 256), n, k)
        return tile(op, table_of(codes.device), self.formula, m, n, k, in_parts=in_parts)

    def run(
        self,
        entry: Tile,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None,
        in_parts: bool = False,
        gate: str | None = None,
    ) -> Tensor:
        """The product with a given tile; for `gate` see `by_warps`, which alone has it."""
        m, k, n, splits = *codes.shape, weight.shape[1], entry["SPLITS"]
        width = n // 2 if gate else n
        if m == 0:
            return torch.empty(0, width, dtype=dtype, device=codes.device)
        lead = [splits] if splits > 1 else []
        out = torch.empty(*lead, m, width, device=codes.device, dtype=torch.float32 if lead else dtype)
        tiles = triton.cdiv(m, entry["BM"]) * triton.cdiv(n, entry["BN"])
        scales = (scale, weight_scale, weight_scale if bias is None else bias)
        options = launch_options(entry, bias, codes.is_cuda)
        blocks = [entry["BM"], WIDTH], [entry["BN"], WIDTH]
        if "STAGES" in entry:
            x, w = map(descriptor, (codes, weight.view(-1, WIDTH)), blocks)
            target = out if lead else descriptor(out, [entry["BM"] // 2, PIECE.value])
            grid = (min(tiles * splits, num_multiprocessors(codes.device)),)
            options |= {"GATE": gate} if gate else {}
            self.by_warp[grid](x, w, *scales, target, m, n, k, *self.strides(scale), **options)
        else:
            x, w = map(TensorDescriptor.from_tensor, (codes, weight.view(-1, WIDTH)), blocks)
            given = (x, w, weight, *scales, out, m, n, k, *self.strides(scale))
            self.by_tile[tiles, splits](*given, **{"AHEAD": 0, **options})
        return sum_of_parts(out, bias, dtype, entry["EARLY"] > 0) if lead and not in_parts else out

    def variants(self, *ops: str) -> Iterator[Variant]:
        """The tables' tiles for Llama-8B's weights, and the formula's."""
        found = {
            (op, tuple(sorted(same_code(tile(op, MEASURED, self.formula, m, n, k, in_parts=m == 1)).items())))
            for op in ops
            for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (896, 4864))
            for m in (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
        }
        for op, items in sorted(found):
            yield self._variant(op, dict(items))

    def gated_variants(self, *ops: str) -> Iterator[Variant]:
        """The tables' tiles for gates and ups of Llama-8B, and the formula's, where `by_warp` takes them."""
        found = {
            (op, tuple(sorted(tile(op, MEASURED, self.formula, m, n, k).items())))
            for op in ops
            for n, k in ((28672, 4096), (9728, 896))
            for m in (256, 512, 1024, 4096)
        }
        for i, (op, items) in enumerate(sorted(found)):
            if "STAGES" in (entry := dict(items)) and entry["SPLITS"] == 1:
                yield self._variant(op, entry, GATE="gelu" if i % 2 else "silu")

    def _variant(self, op: str, entry: dict[str, Any], **more: str) -> Variant:
        by_warp = "STAGES" in entry
        kernel = self.by_warp if by_warp else self.by_tile
        types = dict.fromkeys(("M", "N", "K", "stride_g", "AHEAD"), "i32")
        types |= dict.fromkeys(("x_scale", "w_scale", "bias"), "*fp32")
        element = "i8" if op == "w8a8_int8" else "fp8e4nv"
        types["panels"] = f"*{element}"
        for name, rows in (("x", entry["BM"]), ("w", entry["BN"])):
            block = [rows, WIDTH]
            types[name] = descriptor_type(element, block) if by_warp else f"tensordesc<{element}{block}>"
        types["out"] = descriptor_type("bf16", [entry["BM"] // 2, PIECE.value]) if by_warp else "*bf16"
        if entry["SPLITS"] > 1:
            types["out"] = "*fp32"
        options = launch_options(entry, None, True, stride_t=1, **more)
        constants = {name: value for name, value in options.items() if name in kernel.arg_names}
        constants |= {name: None for name in ("GATE",) if name in kernel.arg_names and name not in constants}
        signature = {name: types[name] for name in kernel.arg_names if name not in constants}
        launch = {name: value for name, value in options.items() if name not in constants}
        label = " ".join([op, *(f"{name}={value}" for name, value in {**entry, **more}.items())])
        return Variant(label, kernel, signature, constants, launch, ("N", "K"), wants_tensor_cores=True)
