"""quantization_config of compressed-tensors <-> schemes (signatures first; the body follows)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.quant.scheme import Scheme


class Quantization:
    """Which scheme each linear has."""

    ignore: tuple[str, ...]
    kv_cache_scheme: dict[str, Any] | None

    def scheme(self, module: str) -> Scheme:
        """Scheme of a full module name."""
        raise NotImplementedError


def quantization_config(scheme: Scheme, *, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a model whose linears, but for `ignore`, all have `scheme`."""
    raise NotImplementedError


def read_quantization(raw_config: Mapping[str, Any]) -> Quantization:
    """Quantization of a parsed config.json."""
    raise NotImplementedError
