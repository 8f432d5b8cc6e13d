"""The KV cache as tensors: for every layer K and V pages of one number format, allocated once.

`KVPool` holds what the page numbers of `pages.py` point to. Memory is not cleared: what lies in a page before
its tokens are written is never read (`kernels/paged_attention.py`). An fp8 cache needs a scale for K and
one for V per layer. Checkpoints bring them (`self_attn.k_scale`, `v_scale`); without them 1.0 is used, values
beyond 448 saturate, and that is said aloud, because on models with large keys it costs accuracy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from qinfer import ops
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import layer_prefix
from qinfer.config import ModelConfig
from qinfer.errors import UserError

logger = logging.getLogger(__name__)

KVScales = Mapping[int, tuple[float, float]]  # layer -> (k_scale, v_scale)


class KVPool:
    """Pages of all layers; `layers[i]` is what the ops take."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        kv_cache_dtype: str,
        *,
        scales: KVScales | None = None,
        device: torch.device,
    ) -> None:
        """Allocates `num_pages` + 1 pages per layer, as page 0 is nobody's; `kv_cache_dtype` is resolved.

        Raises UserError naming layer and value where a scale is not a positive, finite number.
        """
        self.page_size = page_size
        self.dtype = ops.kv_dtype(kv_cache_dtype)
        shape = (num_pages + 1, config.num_kv_heads, page_size, config.head_dim)
        settled = _settle_scales(scales, config.num_layers) if kv_cache_dtype == "fp8" else {}
        self.layers: list[ops.KVPages] = []
        for i in range(config.num_layers):
            k, v = (torch.empty(shape, dtype=self.dtype, device=device) for _ in range(2))
            k_scales = v_scales = None
            if self.dtype == torch.int8:
                k_scales, v_scales = (torch.empty(shape[:3], device=device) for _ in range(2))
            self.layers.append(ops.KVPages(k, v, k_scales, v_scales, *settled.get(i, (1.0, 1.0))))


def resolve_kv_cache_dtype(wanted: str, model_dtype: str, *, checkpoint_has_fp8: bool = False) -> str:
    """What "auto" means: fp8 where the checkpoint was made for it, else the dtype the model runs in."""
    if wanted == "auto":
        return "fp8" if checkpoint_has_fp8 else model_dtype
    return "fp8" if wanted == "fp8_e4m3" else wanted


def scales_in(checkpoint: Checkpoint) -> KVScales:
    """The scales of K and V that a checkpoint brings, empty where it has none."""
    names = checkpoint.names()
    found: dict[int, tuple[float, float]] = {}
    for i in range(checkpoint.config.num_layers):
        prefix = layer_prefix(checkpoint.config, i) + "self_attn."
        for k, v in (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")):  # the latter: ModelOpt
            if f"{prefix}{k}" in names or f"{prefix}{v}" in names:
                found[i] = (_scale(checkpoint, prefix + k), _scale(checkpoint, prefix + v))
    return found


def _scale(checkpoint: Checkpoint, name: str) -> float:
    """One scale for the layer: of scales per key head the largest, on whose grid all heads fit."""
    tensor = checkpoint.tensor(name)
    if tensor.numel() not in (1, checkpoint.config.num_kv_heads):
        raise UserError(
            f"{checkpoint.path}: {name} has shape {list(tensor.shape)}; qinfer reads one scale per layer, "
            f"or one for each of {checkpoint.config.num_kv_heads} key heads"
        )
    return float(tensor.max())


def _settle_scales(scales: KVScales | None, num_layers: int) -> KVScales:
    if not scales:
        logger.warning(
            "the fp8 KV cache has no scales (k_scale, v_scale): 1.0 is used and values beyond 448 saturate"
        )
        return {}
    for layer, pair in scales.items():
        if not 0 <= layer < num_layers:
            raise UserError(f"kv_scales names layer {layer} of a model with {num_layers} layers", "kv_scales")
        for name, value in zip(("k_scale", "v_scale"), pair, strict=True):
            if not (math.isfinite(value) and value > 0):
                raise UserError(
                    f"{name} of layer {layer} is {value}: it must be positive and finite", "kv_scales"
                )
    missing = sorted(set(range(num_layers)) - set(scales))
    if missing:
        raise UserError(f"k_scale and v_scale are missing for layers {missing}", "kv_scales")
    return scales
