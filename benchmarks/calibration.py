"""How well every scheme and method keeps a model's distributions, against text that it was not calibrated on.

    python benchmarks/calibration.py MODEL --calibration c4.txt --text wikitext2.txt [--rows awq gptq ...]

Each row quantizes MODEL into a temporary folder (64 sequences of 512 tokens), reads 40 windows of 1024 tokens
with float32 activations, and compares with the dense model at every position: mean KL in nats, agreement of
the likeliest token, and the perplexity's ratio. Means are over windows, with their standard error. Where a
row's scheme has an RTN row too, windows are paired: Student's t of the difference, one-sided. Seconds and
processor seconds are of the quantization alone. Rows are added to the document that --out names, so that a
table can be made in parts. `--mix BITS` gives the budget of the row `mix`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qinfer
from qinfer.calibrate import mixed_run, pipeline
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from qinfer.hub import resolve
from qinfer.model.causal import CausalAttention
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.tokenizer import Tokenizer

WINDOW, SLICE = 1024, 256
ROWS: dict[str, tuple[str, str]] = {
    "int8-rtn": ("w8a8-int8", "rtn"),
    "int8": ("w8a8-int8", "smoothquant"),
    "int8-gptq": ("w8a8-int8", "smoothquant+gptq"),
    "fp8": ("w8a8-fp8", "rtn"),
    "fp8-smoothquant": ("w8a8-fp8", "smoothquant"),
    "fp8-gptq": ("w8a8-fp8", "gptq"),
    "fp8-static": ("w8a8-fp8-static", "rtn"),
    "fp8-block": ("w8a8-fp8-block", "rtn"),
    "fp8-block-gptq": ("w8a8-fp8-block", "gptq"),
    "w8a16": ("w8a16-int8", "rtn"),
    "w8a16-gptq": ("w8a16-int8", "gptq"),
    "w8a16-fp8": ("w8a16-fp8", "rtn"),
    "w4-rtn": ("w4a16", "rtn"),
    "awq": ("w4a16", "awq"),
    "gptq": ("w4a16", "gptq"),
    "awq+gptq": ("w4a16", "awq+gptq"),
    "mix": ("w4a16", "awq+gptq"),
}
RTN = {scheme: name for name, (scheme, method) in ROWS.items() if method == "rtn"}


class Reader:
    """The windows, and what the dense model makes of them: hidden states, for logits take 200 MB a window."""

    def __init__(self, source: Checkpoint, text: Path, windows: int) -> None:
        ids = Tokenizer.load(source.path).encode(text.read_text(encoding="utf-8"))
        count = len(ids) // WINDOW
        every = max(1, min(count, 40) // windows)
        self.windows = [torch.tensor(ids[i * WINDOW : (i + 1) * WINDOW]) for i in range(0, count, every)][
            :windows
        ]
        self.dense = load_decoder(source, dtype=torch.float32)
        self.hidden = [self._read(self.dense, window) for window in self.windows]

    def compare(self, folder: Path) -> dict[str, list[float]]:
        """KL, agreement and difference of the negative log-likelihood, each a mean per window."""
        model = load_decoder(open_checkpoint(folder), dtype=torch.float32)
        found: dict[str, list[float]] = {"kl": [], "top1": [], "dnll": []}
        for window, hidden in zip(self.windows, self.hidden, strict=True):
            for name, value in self._compare(model, window, hidden).items():
                found[name].append(value)
        return found

    def _read(self, model: Decoder, window: Tensor) -> Tensor:
        return model.forward(window, torch.arange(WINDOW), CausalAttention(1))

    def _compare(self, model: Decoder, window: Tensor, dense: Tensor) -> dict[str, float]:
        ours, kl, top1, nll = self._read(model, window), 0.0, 0.0, 0.0
        for start in range(0, WINDOW, SLICE):
            p = self.dense.logits(dense[start : start + SLICE]).log_softmax(-1)
            q = model.logits(ours[start : start + SLICE]).log_softmax(-1)
            kl += float((p.exp() * (p - q)).sum())
            top1 += float((p.argmax(-1) == q.argmax(-1)).sum())
            targets = window[start + 1 : start + SLICE + 1].unsqueeze(1)
            nll += float((p - q)[: len(targets)].gather(1, targets).sum())
        return {"kl": kl / WINDOW, "top1": top1 / WINDOW, "dnll": nll / (WINDOW - 1)}


def quantized(name: str, source: Checkpoint, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Makes the row's checkpoint; what it took."""
    scheme, method = ROWS[name]
    started, used = time.perf_counter(), time.process_time()
    job = prepare_job(
        source,
        Tokenizer.load(source.path),
        out,
        Settings(
            scheme=scheme,
            method=method,
            calibration=str(options.calibration) if method != "rtn" or "static" in scheme else None,
            num_samples=options.samples,
            max_seq_len=512,
        ),
        mixing=name == "mix",
        progress=False,
    )
    if name == "mix":
        job = mixed_run.within(mixed_run.with_costs(job, progress=False), options.mix)
    report = pipeline.run(job, progress=False)
    return {
        "scheme": report.scheme,
        "method": method,
        "bits": report.average_bits,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
    }


def summary(row: dict[str, Any], rtn: dict[str, Any] | None) -> str:
    """The row's line; `rtn` is that of its scheme."""
    kl = row["windows"]["kl"]
    error = statistics.stdev(kl) / math.sqrt(len(kl))
    line = f"{row['name']:<16}{row['bits']:6.2f} bits  KL {statistics.mean(kl):.5f} +- {error:.5f}"
    line += f"  top-1 {100 * statistics.mean(row['windows']['top1']):.2f} %"
    line += f"  ppl x{math.exp(statistics.mean(row['windows']['dnll'])):.4f}"
    line += f"  {row['seconds']:.0f} s, {row['cpu_seconds']:.0f} of a processor"
    if rtn is not None and rtn is not row and len(rtn["windows"]["kl"]) % len(kl) == 0:
        every = len(rtn["windows"]["kl"]) // len(kl)  # which of them `Reader` takes where it takes fewer
        gains = [a - b for a, b in zip(rtn["windows"]["kl"][::every], kl, strict=True)]
        spread = statistics.stdev(gains) / math.sqrt(len(gains))
        line += (
            f"  better than rtn by {statistics.mean(gains):.5f}, t = {statistics.mean(gains) / spread:.1f}"
        )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--mix", type=float, default=5.0)
    parser.add_argument("--keep", type=Path, help="folder in which the rows' checkpoints stay")
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    options = parser.parse_args()
    source = open_checkpoint(resolve(options.model))
    document: dict[str, Any] = {"qinfer": qinfer.__version__, "threads": torch.get_num_threads(), "rows": []}
    if options.out and options.out.exists():
        document = json.loads(options.out.read_text())
    by_name = {row["name"]: row for row in document["rows"]}
    with torch.inference_mode():
        reader = Reader(source, options.text, options.windows)
    for name in options.rows:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / name
            row = {"name": name, **quantized(name, source, folder, options)}
            with torch.inference_mode():
                row["windows"] = reader.compare(folder)
        by_name[name] = row
        print(summary(row, by_name.get(RTN[ROWS[name][0]])), flush=True)
        if options.out:
            document["rows"] = list(by_name.values())
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
