"""How long until an engine answers: from the start of the process to the first token, with its parts.

    python benchmarks/ready.py [MODEL] [--schemes w8a8-fp8 w4a16] [--memory 24GiB] [--out FILE]

Llama-3.1-8B's shape (or MODEL's) with random weights, 256 sequences, 8192 tokens a step, graphs captured.
Each scheme twice, each time in a new process: with no compiled kernel at all (cold), then with those that the
first run has left (warm). Nothing else should run on the machine. Prints the targets, one row a run, and one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parent / "models" / "llama-3.1-8b"
TARGETS = {"cold": 90.0, "warm": 25.0}  # seconds


def first_token(started: float, model: str, keywords: dict[str, Any]) -> dict[str, float]:
    """Seconds from `started` (of time.time) until qinfer was imported, the engine ready, a token there."""
    from qinfer.llm import LLM
    from qinfer.sampling_params import SamplingParams

    imported = time.time()
    llm = LLM(model, load_format="dummy", allow_ungated=True, max_model_len=2048, **keywords)
    ready = time.time()
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1), use_tqdm=False)
    marks = {"imported": imported, "ready": ready, "first_token": time.time()}
    return {name: mark - started for name, mark in marks.items()}


def measured(cache: str, model: str, keywords: dict[str, Any]) -> dict[str, float]:
    """The same of a new process whose compiled kernels are kept in `cache`."""
    command = [sys.executable, __file__, "--child", json.dumps([time.time(), model, keywords])]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(MODEL), help="a folder with a config.json")
    parser.add_argument("--schemes", nargs="+", default=["w8a8-fp8"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tokenizer", help="a folder; without it transformers is not imported")
    parser.add_argument("--memory", help="a hard budget, 24GiB for instance")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(first_token(*json.loads(arguments.child))))
        return
    fields = ("kv_cache_dtype", "memory", "max_num_seqs", "max_num_batched_tokens", "tokenizer")
    common = {name: getattr(arguments, name) for name in fields}
    print("targets: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in TARGETS.items()), flush=True)
    rows = []
    for scheme in arguments.schemes:
        with tempfile.TemporaryDirectory() as cache:
            for state in TARGETS:
                found = measured(cache, arguments.model, {"scheme": scheme, **common})
                rows.append({"scheme": scheme, "state": state, **found})
                said = "  ".join(f"{name} {seconds:6.1f} s" for name, seconds in found.items())
                print(f"{scheme:<12}{state:<6}{said}", flush=True)
    document = {"benchmark": "ready", "model": Path(arguments.model).name, **common, "rows": rows}
    print(json.dumps(document))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
