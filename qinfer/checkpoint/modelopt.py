"""ModelOpt's dialect: float8 checkpoints that NVIDIA's Model Optimizer exports.

Which numbers a linear has is said by `quant_algo`, in config.json's quantization_config or, in older exports,
in hf_quant_config.json under `quantization`; `quantized_layers` says it layer by layer (MIXED_PRECISION).

    FP8                         weight e4m3 [N, K], weight_scale and input_scale one float32 number each
    FP8_PER_CHANNEL_PER_TOKEN   weight_scale float32 [N], activations per token
    FP8_PB_WO                   weight_scale float32 [ceil(N/128), 1, ceil(K/128), 1], activations untouched

Scales multiply. q, k and v, or gate and up, share their amax by the time they are exported. Algorithms of
int4, int8 and float4 are refused by name: they multiply activations by a pre_quant_scale, or have no kernel
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qinfer.checkpoint.float8 import Float8Linear, Granularity, float8_linears, scheme_for
from qinfer.checkpoint.stored import Folder, Stored
from qinfer.errors import UnsupportedModelError
from qinfer.quant import Dense

METHOD = "modelopt"
# granularity of the weight's scale, and whether activations have a static one
_ALGORITHMS: dict[str, tuple[Granularity, bool]] = {
    "FP8": ("tensor", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("channel", False),
    "FP8_PB_WO": ("block", False),
}


def survey(raw: Mapping[str, Any], folder: Folder) -> dict[str, Stored]:
    """Every linear whose weight is float8.

    Raises UnsupportedModelError for an algorithm that is not one of those above, naming them.
    """
    settings = raw.get("quantization") or raw
    overall = str(settings.get("quant_algo"))
    layers = settings.get("quantized_layers") or {}
    algorithms = {str(layer.get("quant_algo")) for layer in layers.values()} if layers else {overall}
    for algorithm in algorithms:
        if algorithm not in _ALGORITHMS:
            raise UnsupportedModelError(
                f"ModelOpt's {algorithm} is not supported; {', '.join(_ALGORITHMS)} are"
            )
    stored: dict[str, Stored] = {}
    for module, shape in float8_linears(folder).items():
        algorithm = str(layers.get(module, {}).get("quant_algo", overall)) if layers else overall
        if algorithm not in _ALGORITHMS:
            raise UnsupportedModelError(f"{module} is float8, but quantized_layers says nothing of it")
        granularity, is_static = _ALGORITHMS[algorithm]
        linear = Float8Linear(
            Dense(), shape, granularity, "weight_scale", None, "input_scale" if is_static else None
        )
        weight_only = granularity == "block"
        stored[module] = linear if weight_only else replace(linear, scheme=scheme_for(linear))
    return stored
