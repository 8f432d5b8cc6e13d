"""What a step costs the host, apart from any model: schedule, inputs, launching, booking.

    python benchmarks/scheduler.py [--seqs 512] [--steps 200] [--out FILE]

A launched engine (as on a GPU) runs greedy sequences of 512 prompt tokens on a runner that computes nothing:
it makes a decode step's inputs as the real one does, padded, and knows the tokens. So what is measured is all
that has to fit into the time of one step on the device. Prints the target first (1 ms for schedule and inputs
at 512 sequences), then medians of thread time, then one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.buffers import StepBuffers
from qinfer.engine.engine import Engine
from qinfer.engine.inputs import Tables, step_arrays, step_inputs
from qinfer.engine.options import EngineOptions, StepLimits, settle_limits
from qinfer.engine.plan import StepPlan, shape_of
from qinfer.engine.runner import Arriving, TokenIds
from qinfer.engine.sampler import Draw
from qinfer.env import cpu_name
from qinfer.model.decoder import load_decoder
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.testing import tiny_model

TARGET_MS = 1.0
PROMPT, VOCAB = 512, 384


class IdleRunner:
    """Makes a step's inputs, computes nothing, and says the token 65."""

    overlaps = True

    def __init__(self, limits: StepLimits) -> None:
        self.tables = Tables(limits)
        self.buffers = StepBuffers(self.tables, limits, torch.device("cpu"))
        self.limits = limits

    def launch(self, plan: StepPlan, token_ids: TokenIds, draw: Draw | None) -> Arriving:
        arrays = step_arrays(plan, token_ids, self.tables)
        num_tokens, num_seqs = len(arrays.token_ids), len(arrays.lanes)
        shape = shape_of(num_tokens, num_seqs, self.limits, decodes=arrays.is_decode)
        if shape is None:
            step_inputs(arrays, self.tables, draw, torch.device("cpu"))
        else:
            self.buffers.fill(arrays, draw, shape)
        return Arriving(torch.full((len(arrays.sample_rows),), 65))


def timed(times: dict[str, list[float]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        start = time.thread_time()
        result = call(*args)
        times[name].append(time.thread_time() - start)
        return result

    return wrapper


def measure(num_seqs: int, steps: int, drawn: bool) -> dict[str, float]:
    """Median milliseconds per step of each part."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model("llama3", Path(folder) / "tiny", max_position_embeddings=4096)
        decoder = load_decoder(open_checkpoint(path))
    options = EngineOptions(
        num_kv_blocks=num_seqs * 32, block_size=64, max_num_seqs=num_seqs, max_num_batched_tokens=8192
    )
    limits = settle_limits(options, decoder.config.context_len, on_gpu=False)
    engine = Engine(decoder, None, options, runner=IdleRunner(limits))
    params = SamplingParams(
        temperature=0.8 if drawn else 0.0,
        max_tokens=1000,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for i in range(num_seqs):
        engine.add(str(i), [i % VOCAB] * PROMPT, params)
    while engine.scheduler.waiting:
        engine.step()
    times: dict[str, list[float]] = defaultdict(list)
    engine.scheduler.schedule = timed(times, "schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
    engine.runner.launch = timed(times, "inputs", engine.runner.launch)  # type: ignore[method-assign]
    engine.scheduler.commit = timed(times, "commit", engine.scheduler.commit)  # type: ignore[method-assign]
    step = timed(times, "whole step", engine.step)
    for _ in range(steps):
        step()
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    args = parser.parse_args()
    print(f"target: schedule + inputs under {TARGET_MS} ms per step at 512 sequences\n")
    rows = []
    for drawn in (False, True):
        for count in args.seqs:
            found = measure(count, args.steps, drawn)
            rows.append({"sequences": count, "drawn": drawn, **{k: round(v, 4) for k, v in found.items()}})
            print(
                f"{count:4d} {'drawn ' if drawn else 'greedy'} "
                + "  ".join(f"{k} {v:.3f} ms" for k, v in found.items())
            )
    document = json.dumps({"benchmark": "scheduler", "host": cpu_name(), "rows": rows})
    print(document)
    if args.out:
        args.out.write_text(document + "\n")


if __name__ == "__main__":
    main()
