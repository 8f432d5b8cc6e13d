"""Measures tiles where they run: in the chain of all kernels of a step of one sequence.

    python benchmarks/tune_step.py [--schemes w8a8-fp8,w8a8-int8,w4a16] [--only w4a16,qkv_post] [--out TABLE]

A kernel that is fastest alone need not be so here: kernels start early, some ask for what comes next, and
what a product leaves in parts another adds up. So this writes the rows for one token of the products "in
parts", and the row-wise kernels' and attention's rows for one sequence, of Llama-3.1-8B's shape with random
weights.
One op after the other: all its candidates are compiled, the step is captured with each and replayed after 540
and after 1,620 tokens, the longer one at half its weight; the fastest is taken where a second look confirms
that it saves more than the noise.

tune.py first: what it writes is the beginning here. A scheme takes one to two minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tune import CONFIGS, grid, merge

from qinfer import LLM, SamplingParams
from qinfer.engine.graphs import StepGraphs
from qinfer.engine.plan import Shape
from qinfer.engine.runner import Runner
from qinfer.kernels import tiles
from qinfer.kernels.ahead_triton import compiled_ahead

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
LENGTHS = {512: 1.0, 1600: 0.5}  # of prompts, and their weights
NOISE_US = 1.5
ONE = Shape(1, 1)
KV_HEADS = 8
Entry = dict[str, Any]


class Search(NamedTuple):
    """Tiles to try for one row of a table; `upper` is the most tokens, or sequences times KV heads, of it."""

    op: str
    key: str
    entries: list[Entry]
    upper: int = 1


def row_searches() -> Iterator[Search]:
    """What all schemes have, and what those with 8-bit activations have."""
    warps = {"ROWS": (1,), "num_warps": (4, 8, 16, 32), "EARLY": (1, 2)}
    yield Search("rms_norm_parts 4096", "*", grid(**warps))
    yield Search("codes 4096", "*", grid(**warps))
    pieces = grid(ROWS=(1,), PIECES=(4, 8, 16), num_warps=(4, 8, 16), EARLY=(1, 2))
    yield Search("gated_codes 16384", "*", pieces)
    yield Search("qkv_post", "*", grid(ROWS=(1, 2, 4, 8), num_warps=(1, 2), EARLY=(1, 2)))
    few = grid(TILE=(32, 64), num_warps=(1, 2), num_stages=(2, 3, 4), MERGE=(8, 16))
    yield Search("paged_decode_plain", "128x2", few, KV_HEADS)


def product_searches(scheme: str) -> Iterator[Search]:
    """The four weights' tiles, then how far each looks ahead."""
    if scheme == "w4a16":
        for key, blocks, cuts in (
            *(("4096x4096", 64, (2, 4, 8)), ("6144x4096", 96, (2, 4, 8))),
            *(("4096x14336", 64, (4, 7, 8)), ("28672x4096", 448, (1,))),
        ):
            yield Search("w4a16 in parts", key, [e for cut in cuts for e in four_bits(blocks, cut)])
    else:
        op = f"{scheme.replace('-', '_')} in parts"
        for key, splits in (
            *(("4096x4096", (1, 2, 4)), ("6144x4096", (1, 2, 4))),
            *(("4096x14336", (2, 4, 8)), ("28672x4096", (1,))),
        ):
            shape = {"BM": (16,), "BN": (64, 128), "BK": (128, 256), "SWAP": (1,), "SPLITS": splits}
            entries = grid(**shape, EARLY=(1, 2), num_warps=(4,), num_stages=(3, 4, 6), AHEAD=(1,))
            yield Search(op, key, entries)


def four_bits(blocks: int, cut: int) -> Iterator[Entry]:
    """Tiles that cut each of `blocks` of 64 rows into `cut` equal parts."""
    how = {"SLOTS": 264, "EARLY": 1} if cut > 1 else {"SLOTS": 1, "EARLY": 2}
    for rows, warps in ((64, 2), (64, 4), (128, 2), (128, 4)):
        for unroll, stages in ((1, 3), (1, 4), (1, 8), (2, 3), (2, 4)):
            fixed = {"BM": 8, "MODE": 1, "REGISTERS": 0, "TMA": 0, "AHEAD": 2, **how}
            pieces = blocks * 64 // rows * cut if cut > 1 else 0
            chosen = {"BN": rows, "WARPS": warps, "UNROLL": unroll, "STAGES": stages, "PIECES": pieces}
            yield {**fixed, **chosen}


class Chain:
    """A step of one sequence of a scheme, which is captured anew for each tile."""

    def __init__(self, scheme: str) -> None:
        limits: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
        limits |= {"num_kv_blocks": 300, "enable_prefix_caching": False, "allow_ungated": True}
        self.llm = LLM(str(MODEL), load_format="dummy", scheme=scheme, skip_tokenizer_init=True, **limits)
        runner = self.llm.engine.runner
        assert isinstance(runner, Runner)
        assert runner.buffers is not None
        self.runner, self._buffers = runner, runner.buffers
        self._steps = {length: self._last_step(length) for length in LENGTHS}
        config = runner.decoder.config
        self._hidden = torch.zeros(1, config.hidden_size, dtype=runner.decoder.dtype, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _last_step(self, length: int) -> Tensor:
        """The numbers of the last step of an answer to `length` tokens; its pages stay as they are."""
        prompt = {"prompt_token_ids": torch.randint(10, 100_000, (length,)).tolist()}
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        self.llm.generate([prompt], params, use_tqdm=False)
        return self._buffers._arriving.clone()

    def compile(self, search: Search) -> list[Entry]:
        """The entries that compile."""
        good = []
        with compiled_ahead(), torch.inference_mode():
            for entry in search.entries:
                put(search, entry)
                try:
                    self.runner.forward_padded(ONE)
                except Exception as error:  # whatever a launcher says of a candidate: it is none
                    print("not", entry, str(error)[:80])
                    continue
                good.append(entry)
        return good

    def microseconds(self, replays: int = 30) -> float:
        """Median time of a step with the tiles that are in the table, over the lengths by their weights."""
        graphs = StepGraphs(self._hidden)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            graphs.add(self.runner, ONE)
        torch.cuda.synchronize()
        total = 0.0
        for length, weight in LENGTHS.items():
            self._buffers._arriving.copy_(self._steps[length])
            times = []
            for _ in range(replays):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs.replay(ONE)
                end.record()
                end.synchronize()
                graphs.greedy(ONE)  # so that the head goes through the L2 in between
                times.append(start.elapsed_time(end) * 1e3)
            total += weight * sorted(times)[len(times) // 2]
        return total


def put(search: Search, entry: Entry) -> None:
    """Makes `entry` the first row of its table in this process."""
    rows = table().setdefault(search.op, {}).setdefault(search.key, [(None, entry)])
    if rows[0][0] == search.upper:
        rows[0] = (search.upper, entry)
    else:
        rows.insert(0, (search.upper, entry))


def table() -> dict[str, dict[str, list[Any]]]:
    return tiles._table(tiles.gpu_key(torch.cuda.get_device_name()))


def improved(chain: Chain, search: Search) -> bool:
    """Tries the entries of a search and leaves the best in the table; whether that is another one."""
    before = table().get(search.op, {}).get(search.key, [])
    old = next((dict(e) for upper, e in before if upper is None or upper >= search.upper), None)
    times = []
    for entry in chain.compile(search):
        put(search, entry)
        times.append((chain.microseconds(), len(times), entry))
    if not times:  # no candidate compiles
        if old is not None:
            put(search, old)
        return False
    times.sort(key=lambda row: row[:2])
    for time, _, entry in times[:3]:
        print(f"    {time:.1f} us {json.dumps(entry)}", flush=True)
    put(search, old or times[0][2])
    now = chain.microseconds(60)
    put(search, times[0][2])
    new = chain.microseconds(60)
    taken = old is None or new < now - NOISE_US
    print(f"{search.op} {search.key}: {now:.1f} -> {new:.1f} us, {'taken' if taken else 'left'}", flush=True)
    if not taken and old is not None:
        put(search, old)
    return taken


def looking_ahead(search: Search) -> Search:
    """The entry that was found with other distances to ask ahead for."""
    found = table()[search.op][search.key][0][1]
    return search._replace(entries=[{**found, **e} for e in grid(AHEAD=(0, 1, 2, 4, 8), EARLY=(1, 2))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", default="w8a8-fp8,w8a8-int8,w4a16")
    parser.add_argument("--only", default="", help="ops whose names begin so")
    parser.add_argument("--out", type=Path, help="write the table here instead")
    arguments = parser.parse_args()
    path = arguments.out or CONFIGS / f"{tiles.gpu_key(torch.cuda.get_device_name())}.json"
    wanted = tuple(arguments.only.split(","))
    for scheme in arguments.schemes.split(","):
        chain = Chain(scheme)
        print(f"{scheme}: {chain.microseconds(60):.1f} us", flush=True)
        for search in (*row_searches(), *product_searches(scheme)):
            coded = search.op.startswith(("codes", "gated_codes"))
            if not search.op.startswith(wanted) or (coded and scheme == "w4a16"):
                continue
            changed = improved(chain, search)
            if " in parts" in search.op:
                changed = improved(chain, looking_ahead(search)) or changed
            if changed:
                merge(path, {search.op: {search.key: [list(row) for row in table()[search.op][search.key]]}})
        print(f"{scheme}: {chain.microseconds(60):.1f} us", flush=True)
        del chain
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
