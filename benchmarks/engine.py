"""The engine end to end on Llama-3.1-8B's shape: every scheme at one setting, one sequence, small budgets.

    python benchmarks/engine.py [--out benchmarks/results/engine-nvidia-h200.json]
                                [--groups throughput,budget,...] [--num-prompts 1000]
                                [--seconds 300] [--together]

Weights are random (`load_format="dummy"`). Groups:

    throughput  1000 prompts of 512 tokens, 256 answered to each, 256 sequences, 8192 tokens a step, greedy,
                no prefix cache; then one sequence on the same engine
    seqs        the same with 1024 sequences
    budget      the same under --memory 24GiB and 18GiB, where bf16 gets three tenths of the prompts: it holds
                so few sequences at a time that this is a dozen waves too
    static      prompts and answers of 5 to 500 tokens, twice as many: continuous beside fixed batches of 256
    head        one sequence with a head of 8 bits

Each run prints its roofline and its numbers; then come one table, the targets (engine_targets.py) and one
JSON document. A setting runs in a
process of its own, so that one that fails does not take the others along, and on an empty GPU. With
--together all of a set are made ready at once, which saves most of the time, each with its budget or else
with no more pages than it needs, and then measured one after the other: a set must fit the GPU. What is in
--out already stays there unless it is measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine_targets import comparisons

from qinfer.bench import latency, throughput
from qinfer.bench.dataset import Dataset
from qinfer.bench.report import Bench, load, machine_of

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
LIMITS = {"max_num_batched_tokens": 8192, "max_model_len": 2048, "enable_prefix_caching": False}


class Setting(NamedTuple):
    """One engine and what is asked of it: `share` of the prompts, but `at_least` so many.

    `one`: a single sequence as well; `spread`: of lengths from 5 to 500, and once more in fixed batches.
    """

    group: str
    label: str
    scheme: str
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 256
    memory: str | None = None
    share: float = 1.0
    at_least: int = 1
    one: bool = False
    spread: bool = False
    lm_head_dtype: str = "auto"


def settings() -> list[Setting]:
    """All of them, in the order in which they run."""
    schemes = {"bf16": "dense", "fp8": "w8a8-fp8", "int8": "w8a8-int8", "w4a16": "w4a16"}
    found = [Setting("throughput", name, scheme, one=True) for name, scheme in schemes.items()]
    found.insert(2, Setting("throughput", "fp8 + fp8 KV", "w8a8-fp8", "fp8", one=True))
    found.append(Setting("seqs", "fp8 + fp8 KV, 1024 sequences", "w8a8-fp8", "fp8", 1024, at_least=1000))
    for memory, share in (("24GiB", 1.0), ("18GiB", 0.3)):
        found.append(Setting("budget", f"bf16 in {memory}", "dense", memory=memory, share=share))
        found.append(Setting("budget", f"fp8 + fp8 KV in {memory}", "w8a8-fp8", "fp8", memory=memory))
    found.append(Setting("budget", "w4a16 + fp8 KV in 24GiB", "w4a16", "fp8", memory="24GiB"))
    found.append(
        Setting("static", "fp8 + fp8 KV, 5 to 500 tokens", "w8a8-fp8", "fp8", share=2.0, spread=True)
    )
    few: dict[str, Any] = {"max_num_seqs": 16, "share": 0.03, "one": True, "lm_head_dtype": "int8"}
    found.append(Setting("head", "fp8 + fp8 KV, int8 head", "w8a8-fp8", "fp8", **few))
    found.append(Setting("head", "w4a16, int8 head", "w4a16", **few))
    return found


def ready(setting: Setting, *, together: bool) -> Bench:
    """The engine of a setting; beside others one without a budget takes pages for its sequences alone."""
    keywords: dict[str, Any] = {"load_format": "dummy", "scheme": setting.scheme, **LIMITS}
    keywords |= {"kv_cache_dtype": setting.kv_cache_dtype, "max_num_seqs": setting.max_num_seqs}
    keywords["lm_head_dtype"] = setting.lm_head_dtype
    if setting.memory:  # where a step's tokens are what suits the budget
        keywords |= {"memory": setting.memory, "max_num_batched_tokens": None}
    elif together:
        keywords["num_kv_blocks"] = setting.max_num_seqs * (512 + 256) // 64 + 8
    return load(str(MODEL), keywords)


def measure(setting: Setting, bench: Bench, num_prompts: int) -> dict[str, Any]:
    """The document of `qinfer bench throughput`, with `one`, that of a single sequence's latency."""
    num_prompts = max(setting.at_least, round(num_prompts * setting.share))
    dataset = Dataset(num_prompts=num_prompts, input_len=512, output_len=256)
    if setting.spread:  # means of a range: 5 to 500
        lengths = {"output_len": 252, "range_ratio": 0.98, "spread": "log"}
        dataset = Dataset(num_prompts=num_prompts, input_len=252, **lengths)
    asked = throughput.Throughput(dataset, temperature=0.0)
    document = throughput.measure(bench, asked)
    print(throughput.to_text(document), file=sys.stderr, flush=True)
    if setting.spread:
        document["static"] = throughput.measure(bench, replace(asked, scheduling="static"))
        print(throughput.to_text(document["static"]), file=sys.stderr, flush=True)
    if setting.one:  # on an engine that is warm by now
        alone = latency.Latency(512, 256, batch_size=1, num_iters_warmup=0, num_iters=2, temperature=0.0)
        document["one"] = latency.measure(bench, alone)
        print(latency.to_text(document["one"]), file=sys.stderr, flush=True)
    return document


class Apart:
    """A setting in a process of its own, forked while no GPU is in use; it waits when it is ready."""

    def __init__(self, setting: Setting, num_prompts: int, *, together: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        arguments = (setting, num_prompts, together, other)
        self._process = context.Process(target=_child, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def wait(self) -> None:
        """Until it is ready, or has failed and said why."""
        self._pipe.poll(None)

    def measured(self) -> dict[str, Any] | None:
        """The document; None where it failed."""
        try:
            self._pipe.recv()
            self._pipe.send("go")
            document: dict[str, Any] = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            return None
        finally:
            self._process.join()
        return document


def _child(setting: Setting, num_prompts: int, together: bool, pipe: Connection) -> None:
    bench = ready(setting, together=together)
    pipe.send("ready")
    pipe.recv()
    bench = replace(bench, machine=machine_of(bench.llm), model=MODEL.name)  # alone on the machine by now
    pipe.send(measure(setting, bench, num_prompts))


def measured(
    wanted: list[Setting], num_prompts: int, end: float, *, together: bool
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Label and document of one setting after the other; none begins after `end`."""
    made = {setting: Apart(setting, num_prompts, together=True) for setting in wanted if together}
    for child in made.values():
        child.wait()
    for setting in wanted:
        if time.monotonic() < end:
            left = "" if end == float("inf") else f", {end - time.monotonic():.0f} s left"
            print(f"\n{setting.label}{left}", file=sys.stderr, flush=True)
            child = made.get(setting) or Apart(setting, num_prompts, together=False)
            yield setting.label, child.measured()


def row(label: str, document: dict[str, Any] | None) -> str:
    """A line of the table, or two."""
    if document is None:
        return f"{label:<42}failed"
    if static := document.get("static"):
        plain = {name: value for name, value in document.items() if name != "static"}
        return f"{row(label, plain)}\n{row(f'{label}, static', static)}"
    one, ledger = document.get("one"), document["ledger"]
    planned = ledger["planned"] or ledger
    return (
        f"{label:<42}{document['output_tokens_per_second']:>9,.0f}"
        f"{document['roofline_fraction']:>6.0%}"
        f"{one['output_tokens_per_second'] if one else 0:>9,.0f}"
        f"{one['roofline_fraction'] if one else 0:>6.0%}"
        f"{ledger['tokens']:>11,}"
        f"{ledger['tokens'] / planned['tokens'] - 1:>+7.1%}"
        f"{document['batch_occupancy']['mean_running']:>8.1f}"
        f"{document['step_ms']['p50']:>9.2f}"
        f"{document['load_seconds']:>7.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--groups", default="throughput,seqs,budget,static,head", help="or whole labels; a / between sets"
    )
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no setting after this")
    parser.add_argument("--together", action="store_true", help="make all engines ready at once")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any] | None] = {}
    end = time.monotonic() + arguments.seconds
    for groups in arguments.groups.split("/"):
        wanted = [s for s in settings() if {s.group, s.label} & set(groups.split(","))]
        for label, document in measured(wanted, arguments.num_prompts, end, together=arguments.together):
            found[label] = document
            print(row(label, document), file=sys.stderr, flush=True)
            if arguments.out:  # at once: somebody may stop it
                kept = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
                arguments.out.write_text(json.dumps(kept | found, indent=1) + "\n")
    head = f"{'':<42}{'tok/s':>9}{'roof':>6}{'one':>9}{'roof':>6}{'KV tokens':>11}{'plan':>7}{'running':>8}"
    print(f"\n{head}{'step ms':>9}{'load':>7}")
    print("\n".join(row(label, document) for label, document in found.items()))
    print("", *comparisons(found), sep="\n")
    if not arguments.out:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
