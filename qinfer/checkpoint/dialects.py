"""Which tool's words a `quantization_config` is written in, and what they say of each linear.

compressed-tensors speaks for itself (compressed_tensors.py). The dialects of other tools are named by
`quant_method`, or told by the file they stand in: AutoGPTQ's quantize_config.json, AutoAWQ's
quant_config.json, ModelOpt's hf_quant_config.json. What has another name is refused, naming those that are
read, and never taken for an unquantized model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qinfer.checkpoint import awq, float8, gptq, modelopt
from qinfer.checkpoint.compressed_tensors import Quantization, read_quantization
from qinfer.checkpoint.declaration import METHOD, method_of
from qinfer.checkpoint.stored import Folder, Survey, agree
from qinfer.errors import CheckpointError, UnsupportedModelError

_SURVEYS: dict[str, Survey] = {
    awq.METHOD: awq.survey,
    gptq.METHOD: gptq.survey,
    float8.METHOD: float8.survey,
    float8.FBGEMM: float8.survey_fbgemm,
    modelopt.METHOD: modelopt.survey,
}
_FP8_KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
SUPPORTED = ", ".join([METHOD, *_SURVEYS])


def read(raw: Mapping[str, Any] | None, folder: Folder) -> Quantization:
    """What a quantization_config, None for a model that has none, says of the linears in this folder.

    Raises UnsupportedModelError naming the method and those that are supported, or what of a supported one
    cannot be read; CheckpointError where the configuration contradicts the files.
    """
    if raw is None or method_of(raw) == METHOD:
        return read_quantization(raw)
    method = method_of(raw)
    if method not in _SURVEYS:
        named = raw.get("quant_method")
        raise UnsupportedModelError(f"quantization method {named!r} is not supported; supported: {SUPPORTED}")
    try:
        stored = _SURVEYS[method](raw, folder)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"quantization_config of {method} cannot be understood: {error}") from error
    kv_cache_scheme = raw.get("kv_cache_scheme")
    if (raw.get("quantization") or raw).get("kv_cache_quant_algo") == "FP8":  # ModelOpt's older layout
        kv_cache_scheme = kv_cache_scheme or dict(_FP8_KV)
    return Quantization(stored=agree(folder, stored), method=method, kv_cache_scheme=kv_cache_scheme)
