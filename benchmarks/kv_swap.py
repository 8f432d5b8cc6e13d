"""A preempted sequence: is it quicker to compute its KV pages again, or to have kept them in host memory?

    python benchmarks/kv_swap.py [MODEL] [--scheme w8a8-fp8] [--kv-cache-dtype fp8] [--lengths 256 640 2048]
                                 [--out FILE]

Recomputing costs what a prompt of that length does: alone on an idle engine, and as one of eight in the same
steps, an eighth of their time. Swapping: its pages, scattered over the pool, are gathered layer by layer and
copied to pinned memory, and later copied back and put into other pages; nothing runs beside them, so this is
what the simplest way to do it would add to a step. Medians of 5. Llama-3.1-8B's shape (or MODEL's), random
weights. Prints one row a length, and one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qinfer.engine.kv_pool import KVPool
from qinfer.engine.runner import Runner
from qinfer.env import cpu_name
from qinfer.llm import LLM
from qinfer.sampling_params import SamplingParams

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
ROUNDS = 5


class Copies(NamedTuple):
    """One sequence's pages on their way; both run on the current stream and wait for nothing."""

    out: Callable[[], None]
    back: Callable[[], None]
    num_bytes: int


def copies(pool: KVPool, num_pages: int) -> Copies:
    """Of `num_pages` pages at random places, and back into others."""
    device = pool.layers[0].k.device
    places = torch.randperm(len(pool.layers[0].k) - 1, device=device) + 1
    source, target = places[:num_pages], places[num_pages : 2 * num_pages]
    # bytes: indexing knows no fp8
    stores = [_as_bytes(x) for layer in pool.layers for x in layer[:4] if isinstance(x, Tensor)]
    pinned = device.type == "cuda"
    kept = [torch.empty(num_pages, *x.shape[1:], dtype=x.dtype, pin_memory=pinned) for x in stores]

    def out() -> None:
        for host, store in zip(kept, stores, strict=True):
            host.copy_(store[source], non_blocking=True)

    def back() -> None:
        for host, store in zip(kept, stores, strict=True):
            store.index_copy_(0, target, host.to(device, non_blocking=True))

    return Copies(out, back, sum(host.nbytes for host in kept))


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def seconds(work: Callable[[], object]) -> float:
    """Median time of `work`, the device's included."""
    times = []
    for _ in range(ROUNDS + 1):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def recomputed(llm: LLM, length: int, num_prompts: int) -> float:
    """Seconds of one of so many prompts of `length` tokens that an idle engine gets at once."""
    prompts = [{"prompt_token_ids": ids} for ids in torch.randint(0, 256, (num_prompts, length)).tolist()]
    once = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    return seconds(lambda: llm.generate(prompts, once, use_tqdm=False)) / num_prompts


def row(llm: LLM, length: int) -> dict[str, Any]:
    """All figures of one length, in milliseconds."""
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    copy = copies(runner.pool, -(-length // runner.pool.page_size))
    found = {
        "recomputed": recomputed(llm, length, 1),
        "recomputed_of_8": recomputed(llm, length, 8),
        "out": seconds(copy.out),
        "back": seconds(copy.back),
    }
    return {"tokens": length, "bytes": copy.num_bytes, **{k: round(1e3 * v, 3) for k, v in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(MODEL), help="a folder with a config.json")
    parser.add_argument("--scheme", default="w8a8-fp8")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 640, 2048])
    parser.add_argument("--num-kv-blocks", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        load_format="dummy",
        scheme=arguments.scheme,
        kv_cache_dtype=arguments.kv_cache_dtype,
        num_kv_blocks=arguments.num_kv_blocks,
        max_model_len=2 * max(arguments.lengths),
        max_num_seqs=16,
        enable_prefix_caching=False,
        allow_ungated=True,
    )
    about = {"scheme": arguments.scheme, "kv_cache_dtype": llm.engine.kv_cache_dtype}
    print(
        f"{'tokens':>7}{'MiB':>8}{'recomputed':>12}{'of 8':>9}{'out':>9}{'back':>9}   ms, {about}", flush=True
    )
    rows = []
    for length in arguments.lengths:
        rows.append(found := row(llm, length))
        print(
            f"{length:>7}{found['bytes'] / 2**20:>8.1f}{found['recomputed']:>12.2f}"
            f"{found['recomputed_of_8']:>9.2f}{found['out']:>9.2f}{found['back']:>9.2f}",
            flush=True,
        )
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    document = {"benchmark": "kv_swap", "device": name, "torch": torch.__version__, **about, "rows": rows}
    print(json.dumps(document))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
