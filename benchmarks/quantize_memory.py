"""Peak memory and time of a quantize run against what `--dry-run` plans, on random weights of any shape.

    python benchmarks/quantize_memory.py --shape 70b --layers 2 --scheme awq --tokens 2048

Each run is a process of its own, whose peak the system tells. The weights are made as they are asked for, so
no file is needed; what is written goes to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import torch

from qinfer.calibrate import pipeline
from qinfer.calibrate.data import CalibrationData
from qinfer.calibrate.needs import Work, disk, memory
from qinfer.calibrate.pace import effort, measured_pace
from qinfer.calibrate.recipe import settle
from qinfer.checkpoint.dummy import open_dummy

SHAPES = {  # hidden, intermediate, heads, key heads, vocabulary
    "135m": (576, 1536, 9, 3, 49152),
    "1b": (2048, 8192, 32, 8, 128256),
    "8b": (4096, 14336, 32, 8, 128256),
    "70b": (8192, 28672, 64, 8, 128256),
}


def config(shape: str, layers: int) -> dict[str, object]:
    """A Llama of this shape."""
    hidden, inner, heads, key_heads, vocabulary = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shape == "135m",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }


def main() -> None:
    """Plans, runs, prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--scheme", default="awq")
    parser.add_argument("--method")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config(arguments.shape, arguments.layers)))
        checkpoint = open_dummy(source)
        recipe = settle(checkpoint.config, arguments.scheme, arguments.method)
        data = _text(arguments.tokens, arguments.length) if recipe.needs_text else None
        job = pipeline.QuantizeJob(checkpoint, Path(folder) / "out", recipe, data)
        tokens = arguments.tokens if recipe.needs_text else 0
        work = Work(
            checkpoint.config,
            recipe,
            tokens,
            arguments.length,
            pipeline.SEARCH_TOKENS,
            job.activations.itemsize,
        )
        effort_of_layer, pace = effort(work), measured_pace(job.activations)
        before, cpu, start = _peak(), time.process_time(), time.perf_counter()
        pipeline.run(job, progress=False)
        took = time.process_time() - cpu
        written = sum(file.stat().st_size for file in (Path(folder) / "out").iterdir())
        _show("memory beside the process, MiB", memory(work), 2**20, (_peak() - before) / 2**20)
        _show("disk, MiB", disk(work), 2**20, written / 2**20)
        counted = zip(pace._fields, effort_of_layer, pace, strict=True)
        terms = {name: count / speed for name, count, speed in counted}
        _show(f"seconds of a layer, {pace}", terms, 1, took / arguments.layers)
        print(
            f"wall {(time.perf_counter() - start) / arguments.layers:.1f} s a layer, {os.cpu_count()} cores"
        )


def _show(what: str, planned: dict[str, float], unit: float, measured: float) -> None:
    terms = ", ".join(f"{name} {size / unit:.1f}" for name, size in planned.items())
    print(f"{what}: planned {sum(planned.values()) / unit:.1f} ({terms}), measured {measured:.1f}")


def _text(tokens: int, length: int) -> CalibrationData:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40000, (tokens // length, length), generator=generator).tolist()
    return CalibrationData(tuple(map(tuple, ids)), "random", 0, (("random", len(ids)),))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
