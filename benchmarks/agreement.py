"""Perplexity of one model through the GPU's kernels, and through the ops' meanings in plain torch.

    python benchmarks/agreement.py MODEL IDS [--schemes dense,w8a8-fp8,...] [--kv auto,int8,fp8]
                                   [--windows 40] [--device cuda] [--out FILE]

MODEL is a folder of safetensors in its own dtype; its linears are rounded to each scheme as they are loaded.
IDS is a JSON list of token ids, cut into windows of 1024; static scales are fitted to the first. Both
backends score the same weights on the same device, through the engine's pages; only what computes differs.
They should agree within 0.5 %. On a machine without a GPU there are no kernels, and the two columns show what
the CPU's own ops and the meanings say.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qinfer import backend
from qinfer.checkpoint.checkpoint import CPU, Checkpoint, open_checkpoint
from qinfer.checkpoint.names import layer_groups, layer_prefix
from qinfer.checkpoint.rounded import RoundedCheckpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.evals.perplexity import likelihoods, token_perplexity
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import load_decoder
from qinfer.quant import SCHEMES, W4A16, Scheme, W8A8Fp8Static, scheme_by_name

WINDOW = 1024
LIMIT = 0.005


class Rounded(RoundedCheckpoint):
    """A rounded checkpoint whose static scales hold `ranges`, the largest input of each linear."""

    def __init__(self, source: Checkpoint, scheme: Scheme, ranges: Mapping[str, float]) -> None:
        super().__init__(source, scheme)
        self._ranges = ranges

    def module(self, module: str, device: torch.device = CPU) -> dict[str, Tensor]:
        """The linear's tensors, made now on `device`."""
        tensors, scheme = super().module(module, device), self.scheme(module)
        static = isinstance(scheme, W8A8Fp8Static)
        return scheme.with_input_range(tensors, self._ranges[module]) if static else tensors


@torch.inference_mode()
def input_ranges(source: Checkpoint, window: list[int], device: torch.device) -> dict[str, float]:
    """The largest input of each linear, by name, on one window."""
    decoder, config = load_decoder(source, device=device), source.config
    hidden = decoder.embed(torch.tensor(window, device=device))
    rope = decoder.rope(torch.arange(len(window), device=device))
    found: dict[str, float] = {}
    for i, layer in enumerate(decoder.layers):
        seen: dict[str, float] = {}

        def tap(name: str, x: Tensor, seen: dict[str, float] = seen) -> None:
            seen[name] = float(x.abs().amax())

        hidden = layer(hidden, rope, CausalAttention(), tap)
        for group in layer_groups(config):
            found |= {layer_prefix(config, i) + module: seen[group.name] for module in group.modules}
    return found


def scheme_of(name: str) -> Scheme:
    """4 bits in groups of 64, which divide the widths of small models."""
    return scheme_by_name(name, group_size=64) if name == W4A16.name else scheme_by_name(name)


def perplexity(decoder: Any, kv: str, windows: list[list[int]], chosen: str) -> float:
    """Of the windows, with one backend."""
    os.environ["QINFER_BACKEND"] = chosen
    backend.settings.cache_clear()
    options = EngineOptions(
        max_num_seqs=1, max_num_batched_tokens=WINDOW, max_model_len=WINDOW + 64, num_kv_blocks=160,
        kv_cache_dtype=kv, enable_prefix_caching=False, enforce_eager=True,
    )  # fmt: skip
    engine = Engine(decoder, None, options)
    return token_perplexity(list(likelihoods(engine.prompt_logits, windows))).value


def compare(
    source: Checkpoint, name: str, kv_dtypes: list[str], windows: list[list[int]], device: torch.device
) -> list[dict[str, Any]]:
    """A row for each dtype of the cache."""
    scheme = scheme_of(name)
    ranges = input_ranges(source, windows[0], device) if isinstance(scheme, W8A8Fp8Static) else {}
    decoder = load_decoder(Rounded(source, scheme, ranges), device=device)
    rows = []
    for kv in kv_dtypes:
        start = time.perf_counter()
        torch_path = perplexity(decoder, kv, windows, "torch")
        kernels = perplexity(decoder, kv, windows, "auto")
        off = kernels / torch_path - 1
        row = {"scheme": name, "kv": kv, "torch": torch_path, "kernels": kernels, "off": off}
        rows.append(row)
        passed = "ok" if abs(off) <= LIMIT else "DIFFERS"
        seconds = time.perf_counter() - start
        print(
            f"{name:<16}{kv:<6}{torch_path:>10.4f}{kernels:>10.4f}{off:>+9.3%} {passed} {seconds:.0f} s",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--kv", default="auto,int8,fp8")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--device", default=str(backend.model_device()))
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    arguments = parser.parse_args()
    ids = json.loads(arguments.ids.read_text())
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(arguments.windows)]
    assert all(len(window) == WINDOW for window in windows), f"{len(ids)} ids are too few"
    source, device = open_checkpoint(arguments.model), torch.device(arguments.device)
    print(f"{'scheme':<16}{'KV':<6}{'torch':>10}{'kernels':>10}{'off':>9}")
    rows: list[dict[str, Any]] = []
    for name in arguments.schemes.split(","):
        rows += compare(source, name, arguments.kv.split(","), windows, device)
        if arguments.out:
            document = {
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "rows": rows,
            }
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
