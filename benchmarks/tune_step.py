"""Measures tiles where they run: in the chain of all kernels of a step.

    python benchmarks/tune_step.py [--steps 1,256,1024,2048] [--schemes w8a8-fp8,w8a8-int8,w4a16]
                                   [--only w4a16,qkv_post] [--out TABLE]

A kernel that is fastest alone need not be so here: kernels start early, some ask for what comes next, what a
product leaves in parts another adds up, and a product that starts early takes from the kernel before it what
that would need to be fast. So this writes, of Llama-3.1-8B's shape with random weights,

* of a step of one sequence, the rows for one token of the products "in parts", the row-wise kernels' and
  attention's; it is replayed after 540 and after 1,620 tokens, the longer one at half its weight;
* of a decode step of 256 sequences, and of prompts with 1,024 and 2,048 tokens in all, the row-wise kernels'
  rows and the products', of eight layers.

One op after the other: all its candidates are compiled, the step is captured with each and replayed; the
fastest is taken where a second look confirms that it saves more than the noise.

tune.py first: what it writes is the beginning here. A scheme's step takes half a minute to two minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tune import CONFIGS, grid, merge

from qinfer import LLM
from qinfer.engine.graphs import StepGraphs
from qinfer.engine.plan import Chunk, Shape, StepPlan
from qinfer.engine.runner import Runner
from qinfer.kernels import tiles
from qinfer.kernels.ahead_triton import compiled_ahead

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
NOISE = 1e-3  # of a step's time
SETTLE = 0.3  # seconds of steps of many tokens; at its power limit a GPU takes as long to find its clocks
KV_HEADS, PAGE = 8, 64
Entry = dict[str, Any]
Rows = list[tuple[int | None, Entry]]


class Step(NamedTuple):
    """What is timed: so many sequences, all of their tokens, or with `decodes` the next one after them.

    Rows of tables are those for more than `above` tokens, up to `upper`.
    """

    sequences: int
    lengths: Mapping[int, float]  # tokens of each, and the weights of these steps
    decodes: bool
    above: int
    upper: int | None
    layers: int


STEPS = {
    1: Step(1, {540: 1.0, 1620: 0.5}, True, 0, 1, 32),
    256: Step(256, {600: 1.0}, True, 128, 256, 8),
    1024: Step(2, {512: 1.0}, False, 512, 1024, 8),
    2048: Step(4, {512: 1.0}, False, 1024, None, 8),
}


class Search(NamedTuple):
    """Tiles to try for the row of a table for more than `above` tokens, or sequences times KV heads."""

    op: str
    key: str
    entries: list[Entry]
    upper: int | None = 1
    above: int = 0


def searches(step: Step, scheme: str) -> Iterator[Search]:
    """All of a step."""
    if step.upper == 1:
        yield from row_searches(scheme)
        yield from product_searches(scheme)
    else:
        for search in (*many_row_searches(scheme), *many_product_searches(scheme, step.above < 256)):
            yield search._replace(upper=step.upper, above=step.above)


def many_row_searches(scheme: str) -> Iterator[Search]:
    """Of many tokens."""
    entries = grid(ROWS=(1,), num_warps=(4, 8, 16, 32), EARLY=(0, 1, 2))
    yield Search("rms_norm 4096", "*", entries)
    if scheme.startswith("w8a8"):
        yield Search("codes 4096", "*", entries)
        yield Search("codes 16384", "*", entries)
    else:
        yield Search("gated", "*", grid(ROWS=(1,), LANES=(1024, 2048), num_warps=(4, 8), EARLY=(0, 1, 2)))
    yield Search("qkv_post", "*", grid(ROWS=(4, 8), num_warps=(1, 2), EARLY=(0, 1, 2)))


def many_product_searches(scheme: str, cut: bool) -> Iterator[Search]:
    """Of many tokens, for 8-bit activations; `cut`: whether K may be."""
    if not scheme.startswith("w8a8"):
        return
    shape = {"BM": (128,), "BN": (256,), "STAGES": (4,), "GROUP": (8, 16, 32), "SPLITS": (1,)}
    other = {**shape, "BM": (256,), "BN": (128,), "GROUP": (8, 16)}
    small = {**shape, "BN": (128,), "STAGES": (6,), "GROUP": (16,), "SPLITS": (1, 2) if cut else (1,)}
    rest: dict[str, tuple[int, ...]] = {"EARLY": (0, 1), "num_warps": (4,)}
    for key in ("6144x4096", "4096x4096", "28672x4096", "4096x14336"):
        entries = [entry for tiles in (shape, other, small) for entry in grid(**tiles, **rest)]
        yield Search(scheme.replace("-", "_"), key, [e for e in entries if e["SPLITS"] == 1 or e["EARLY"]])


def row_searches(scheme: str) -> Iterator[Search]:
    """What all schemes have, and what those with 8-bit activations have."""
    warps = {"ROWS": (1,), "num_warps": (4, 8, 16, 32), "EARLY": (1, 2)}
    yield Search("rms_norm_parts 4096", "*", grid(**warps))
    if scheme.startswith("w8a8"):
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
    """A step of a scheme, which is captured anew for each tile."""

    def __init__(self, scheme: str, step: Step) -> None:
        self._pages = -(-(max(step.lengths) + 1) // PAGE)  # of a sequence
        limits: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": max(16, step.sequences)}
        limits |= {"block_size": PAGE}
        limits |= {"max_num_batched_tokens": 8192, "num_kv_blocks": step.sequences * self._pages + 200}
        config = json.loads((MODEL / "config.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            config["num_hidden_layers"] = step.layers
            Path(folder, "config.json").write_text(json.dumps(config))
            limits |= {"load_format": "dummy", "skip_tokenizer_init": True, "allow_ungated": True}
            self.llm = LLM(folder, scheme=scheme, **limits)
        runner = self.llm.engine.runner
        assert isinstance(runner, Runner)
        assert runner.buffers is not None
        self.step, self.runner, self._buffers = step, runner, runner.buffers
        self._steps = {length: self._numbers(length) for length in step.lengths}
        tokens = step.sequences if step.decodes else step.sequences * max(step.lengths)
        self.shape = Shape(tokens, step.sequences if step.decodes else runner.limits.max_num_seqs)
        self._hidden = torch.zeros(
            self.shape.num_seqs, config["hidden_size"], dtype=runner.decoder.dtype, device="cuda"
        )
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _numbers(self, length: int) -> Tensor:
        """What is brought to the device for the step with sequences of `length`, whose pages are filled."""
        every = range(self.step.sequences)
        if self.step.decodes:
            for i in every:
                self._run({i: (0, length)})
            self._run(dict.fromkeys(every, (length, length + 1)))
        else:
            self._run(dict.fromkeys(every, (0, length)))
        return self._buffers._arriving.clone()

    def _run(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        """A step of tokens [start, stop) of sequences."""
        chunks = tuple(Chunk(i, *between, sample=True, lane=i) for i, between in ranges.items())
        pages = {i: tuple(range(1 + i * self._pages, 1 + (i + 1) * self._pages)) for i in ranges}
        ids = {i: [(37 * i + 11 * t) % 100_000 for t in range(stop)] for i, (_, stop) in ranges.items()}
        self.runner.run(StepPlan(chunks, pages), ids)

    def compile(self, search: Search, before: Rows) -> list[Entry]:
        """The entries that compile."""
        good = []
        with compiled_ahead(), torch.inference_mode():
            for entry in search.entries:
                put(search, entry, before)
                try:
                    self.runner.forward_padded(self.shape)
                except Exception as error:  # whatever a launcher says of a candidate: it is none
                    print("not", entry, str(error)[:80])
                    continue
                good.append(entry)
        return good

    def microseconds(self, replays: int = 30) -> float:
        """Median time of a step with the tiles that are in the table, over the lengths by their weights."""
        graphs, shape = StepGraphs(self._hidden), self.shape
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            graphs.add(self.runner, shape)
        torch.cuda.synchronize()
        total = 0.0
        for length, weight in self.step.lengths.items():
            self._buffers._arriving.copy_(self._steps[length])
            begin = time.perf_counter()
            while shape.num_tokens > 1 and time.perf_counter() < begin + SETTLE:
                graphs.replay(shape)
                torch.cuda.synchronize()
            times = []
            for _ in range(replays):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graphs.replay(shape)
                end.record()
                end.synchronize()
                if shape.decodes:
                    graphs.greedy(shape)  # so that the head goes through the L2 in between
                times.append(start.elapsed_time(end) * 1e3)
            total += weight * sorted(times)[len(times) // 2]
        return total


def put(search: Search, entry: Entry, before: Rows) -> None:
    """Makes `entry` the row of its table in this process; `before` has the rows for other sizes."""
    if not before:  # rows in parts go before the op's own
        before = [(search.upper if " in parts" in search.op else None, entry)]
    table().setdefault(search.op, {})[search.key] = placed(before, search.above, search.upper, entry)


def placed(rows: Rows, above: int, upper: int | None, entry: Entry) -> Rows:
    """The rows with `entry` for sizes past `above`, up to `upper`."""
    smaller = [row for row in rows if bound(row[0]) <= above]
    if above and not any(row[0] == above for row in smaller):
        smaller.append((above, entry_for(rows, above)))
    return [*smaller, (upper, entry), *(row for row in rows if bound(row[0]) > bound(upper))]


def bound(upper: int | None) -> float:
    return math.inf if upper is None else upper


def entry_for(rows: Rows, size: float) -> Entry:
    return next(dict(entry) for upper, entry in rows if bound(upper) >= size)


def table() -> dict[str, dict[str, list[Any]]]:
    return tiles._table(tiles.gpu_key(torch.cuda.get_device_name()))


def improved(chain: Chain, search: Search) -> bool:
    """Tries the entries of a search and leaves the best in the table; whether that is another one."""
    before = table().get(search.op, {}).get(search.key, [])
    times: list[tuple[float, int, Entry]] = []
    for entry in chain.compile(search, before):
        put(search, entry, before)
        times.append((chain.microseconds(), len(times), entry))
    restore(search, before)
    if not times:  # no candidate compiles
        return False
    times.sort(key=lambda row: row[:2])
    for us, _, entry in times[:3]:
        print(f"    {us:.1f} us {json.dumps(entry)}", flush=True)
    now = chain.microseconds(60)
    put(search, times[0][2], before)
    new = chain.microseconds(60)
    taken = new < now * (1 - NOISE)
    print(f"{search.op} {search.key}: {now:.1f} -> {new:.1f} us, {'taken' if taken else 'left'}", flush=True)
    if not taken:
        restore(search, before)
    return taken


def restore(search: Search, rows: Rows) -> None:
    """Puts back what the table had; without rows the formula counts again."""
    if rows:
        table()[search.op][search.key] = rows
    else:
        table()[search.op].pop(search.key, None)


def looking_ahead(search: Search) -> Search:
    """The entry that was found with other distances to ask ahead for."""
    found = table()[search.op][search.key][0][1]
    return search._replace(entries=[{**found, **e} for e in grid(AHEAD=(0, 1, 2, 4, 8), EARLY=(1, 2))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="tokens of the steps")
    parser.add_argument("--schemes", default="w8a8-fp8,w8a8-int8,w4a16")
    parser.add_argument("--only", default="", help="ops whose names begin so")
    parser.add_argument("--out", type=Path, help="write the table here instead")
    arguments = parser.parse_args()
    path = arguments.out or CONFIGS / f"{tiles.gpu_key(torch.cuda.get_device_name())}.json"
    wanted = tuple(arguments.only.split(","))
    for scheme in arguments.schemes.split(","):
        for number in arguments.steps.split(","):
            tune(scheme, STEPS[int(number)], wanted, path)


def tune(scheme: str, step: Step, wanted: tuple[str, ...], path: Path) -> None:
    """Tries all searches of a step whose ops' names begin so, and writes what became faster."""
    chain = Chain(scheme, step)
    print(f"{scheme}, {chain.shape}: {chain.microseconds(60):.1f} us", flush=True)
    for search in searches(step, scheme):
        if not search.op.startswith(wanted):
            continue
        changed = improved(chain, search)
        if " in parts" in search.op and search.key in table().get(search.op, {}):
            changed = improved(chain, looking_ahead(search)) or changed
        if changed:
            merge(path, {search.op: {search.key: [list(row) for row in table()[search.op][search.key]]}})
    print(f"{scheme}, {chain.shape}: {chain.microseconds(60):.1f} us", flush=True)
    del chain
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
