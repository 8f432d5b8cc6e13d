"""What the gate's reading costs: a candidate's KL on windows of text, beside a forward pass of transformers.

    python benchmarks/gate.py CANDIDATE --against SOURCE [--text FILE] [--windows 40] [--window 1024]

The source has been read before, as in every evaluation but the first. Then window by window, so that a
machine that others use as well slows both: transformers runs the source in bfloat16 and makes the logits of
all positions; qinfer runs the candidate through its engine, makes its logits, and the source's from kept
hidden states, and scores them. Loading is in neither time. Wall seconds and the process's own, which others
disturb less. One JSON document goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from qinfer.env import cpu_name
from qinfer.evals import fidelity, text
from qinfer.evals.statistics import mean_interval
from qinfer.evals.store import Store
from qinfer.reading import Reader, Serving, open_model, read_text

Seconds = dict[str, dict[str, float]]  # by whom, wall and cpu


def main() -> None:
    options = _options()
    source, candidate = open_model(options.against), open_model(options.model)
    if options.text:
        cut = text.text_windows(source.tokenizer, read_text(options.text), options.window)
    else:
        cut = text.reference_windows(source.tokenizer, options.window)
    windows = [list(window.token_ids) for window in cut][: options.windows]
    model = AutoModelForCausalLM.from_pretrained(source.checkpoint.path, dtype=torch.bfloat16)
    with TemporaryDirectory() as folder:
        store = Store(Path(folder))
        reference = Reader(
            source, Serving.settle("float32", "auto", source.checkpoint), options.window, store
        )
        for i, ids in enumerate(windows):
            print(f"\rsource {i + 1}/{len(windows)}", end="", file=sys.stderr)
            reference.hidden(ids)
        reference.unload()
        served = Reader(candidate, Serving.settle("auto", "auto", candidate.checkpoint), options.window)
        for reader in (reference, served):  # loads, and warms up
            next(reader.logits(windows[0]))
        seconds, scores = _turn_by_turn(model, reference, served, windows)
    kl = mean_interval([window.kl for window in scores])
    document = {
        "date": date.today().isoformat(),
        "processor": cpu_name(),
        "model": Path(options.model).name,
        "against": Path(options.against).name,
        "schemes": sorted(candidate.schemes()),
        "windows": len(windows),
        "tokens": sum(map(len, windows)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": seconds,
        "ratio": _ratio(seconds),
        "mean_kl": kl._asdict(),
    }
    print(json.dumps(document, indent=2))


def _turn_by_turn(
    model: Any, reference: Reader, served: Reader, windows: list[list[int]]
) -> tuple[Seconds, list[fidelity.WindowScores]]:
    """Each window by transformers, then by both readers, whose scores are kept."""
    seconds: Seconds = {who: {"wall": 0.0, "cpu": 0.0} for who in ("transformers", "qinfer")}
    scores: list[fidelity.WindowScores] = []
    for i, ids in enumerate(windows):
        with _timed(seconds["transformers"]), torch.inference_mode():
            model(torch.tensor([ids]))
        with _timed(seconds["qinfer"]):
            scores += fidelity.compare(reference.logits, served.logits, [ids])
        ratio = _ratio(seconds)
        line = f"\rwindow {i + 1}/{len(windows)}: {ratio['wall']:.2f}x wall, {ratio['cpu']:.2f}x cpu"
        print(line, end="", file=sys.stderr)
    print(file=sys.stderr)
    return seconds, scores


def _ratio(seconds: Seconds) -> dict[str, float]:
    return {kind: seconds["qinfer"][kind] / seconds["transformers"][kind] for kind in ("wall", "cpu")}


@contextmanager
def _timed(total: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of what is inside."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    total["wall"] += time.perf_counter() - wall
    total["cpu"] += time.process_time() - cpu


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--against", required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=1024)
    return parser.parse_args()


if __name__ == "__main__":
    main()
