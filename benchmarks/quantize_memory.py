"""Peak memory and time of a quantize run against what `--dry-run` plans, on random weights of any shape.

    python benchmarks/quantize_memory.py --shape 70b --layers 2 --scheme awq --tokens 2048
    python benchmarks/quantize_memory.py --shape 8b --layers 6 --scheme gptq --tokens 32768 \\
        --device cuda --out results.json

A run is a process of its own, whose peak the system tells; a GPU's is what torch took of it and, with the
context and libraries, what the driver counts. The weights are made as they are asked for, so no file is
needed; what is written goes to a temporary folder. All layers of the shape are extrapolated:
the median of the layers after the first, for each, and once what a run does beside its layers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qinfer.calibrate import needs, pipeline
from qinfer.calibrate.data import CalibrationData
from qinfer.calibrate.devices import chosen_device, device_name
from qinfer.calibrate.job import QuantizeJob
from qinfer.calibrate.pace import Pace, disk_seconds, effort, measured_pace
from qinfer.calibrate.recipe import settle
from qinfer.checkpoint.checkpoint import CPU
from qinfer.checkpoint.dummy import DummyCheckpoint, open_dummy
from qinfer.env import cpu_name

SHAPES = {  # hidden, intermediate, heads, key heads, vocabulary, layers
    "135m": (576, 1536, 9, 3, 49152, 30),
    "1b": (2048, 8192, 32, 8, 128256, 16),
    "8b": (4096, 14336, 32, 8, 128256, 32),
    "70b": (8192, 28672, 64, 8, 128256, 80),
}


def config(shape: str, layers: int, vocabulary: int | None = None) -> dict[str, object]:
    """A Llama of this shape."""
    hidden, inner, heads, key_heads, usual, _ = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary or usual,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shape == "135m",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }


class _Made(DummyCheckpoint):
    """Makes what is asked for on the CPU on the run's device: a GPU is a hundred times faster at it."""

    @classmethod
    def on(cls, device: torch.device, dummy: DummyCheckpoint) -> _Made:
        made = cls(dummy.path, dummy.raw_config, dummy.quantization)
        made.maker = device
        return made

    def tensor(self, name: str, device: torch.device = CPU) -> torch.Tensor:
        return super().tensor(name, self.maker).to(device)


def main() -> None:
    """Plans, runs, prints both, and the JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--scheme", default="awq")
    parser.add_argument("--method")
    parser.add_argument("--vocabulary", type=int, help="another than the shape's")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--on-disk", action="store_true", help="hidden states, though memory suffices")
    parser.add_argument("--out", type=Path, help="add the result to the rows of this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    print(json.dumps(result))
    if arguments.out is not None:
        document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
        document["rows"].append(result)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run, with what was planned of it."""
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps(config(arguments.shape, arguments.layers, arguments.vocabulary))
    )
    device = chosen_device(arguments.device)
    checkpoint = _Made.on(device, open_dummy(source))
    recipe = settle(checkpoint.config, arguments.scheme, arguments.method)
    data = (
        _text(arguments.tokens, arguments.length, checkpoint.config.vocab_size) if recipe.needs_text else None
    )
    job = QuantizeJob(checkpoint, folder / "out", recipe, data, device=device)
    pace, work = measured_pace(recipe.scheme, job.activations, device), job.work
    if arguments.on_disk:
        needs.spills, work = (lambda *_: True), replace(work, on_disk=True)
    gpu_before = _gpu_used(device)
    before, cpu, start = _peak(), time.process_time(), time.perf_counter()
    report = pipeline.run(job, progress=False)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    written = sum(file.stat().st_size for file in (folder / "out").iterdir())
    result = {
        "shape": arguments.shape,
        "recipe": f"{recipe.scheme.label} {recipe.method}",
        "tokens": work.tokens,
        "device": device_name(device) if work.on_gpu else cpu_name(),
        "layers": arguments.layers,
        "on_disk": work.on_disk,
        "torch": torch.__version__,
    }
    print(result)
    print(f"pace {pace}, {os.cpu_count()} cores")
    result["memory"] = _show("memory beside the process", needs.memory(work), _peak() - before)
    result["disk"] = _show("disk", needs.disk(work), written)
    if work.on_gpu:
        planned = needs.gpu_memory(work)
        result["gpu_memory"] = _show("GPU memory", planned, torch.cuda.max_memory_allocated(device))
        result["gpu_reserved"] = torch.cuda.max_memory_reserved(device)
        result["gpu_process"] = gpu_before
        print(
            f"GPU: {result['gpu_reserved'] / 2**20:.0f} MiB taken by torch, {gpu_before / 2**20:.0f} before"
        )
    seconds = [layer.seconds for layer in report.layers]
    print("layers " + " ".join(f"{x:.2f}" for x in seconds) + f" s; wall {wall:.1f} s, processor {cpu:.1f} s")
    return result | {
        "seconds": {"layers": seconds, "wall": wall, "processor": cpu},
        "whole": _whole(work, pace, seconds, wall, SHAPES[arguments.shape][-1]),
    }


def _whole(work: needs.Work, pace: Pace, seconds: list[float], wall: float, layers: int) -> dict[str, Any]:
    """All `layers` of the shape, as planned and by these layers' seconds in a run of `wall` seconds."""
    counted = zip(pace._fields, effort(work), pace, strict=True)
    terms = {name: count / speed for name, count, speed in counted}
    per_layer = statistics.median(seconds[1:] or seconds)
    named = ", ".join(f"{name} {x:.2f}" for name, x in terms.items())
    print(f"a layer: planned {sum(terms.values()):.2f} s ({named}), measured {per_layer:.2f}")
    all_layers = replace(work, config=replace(work.config, num_layers=layers))
    planned = layers * sum(terms.values()) + disk_seconds(all_layers)
    beside = wall - sum(seconds)
    # what is written, journal and shards, grows with the layers; the ends do not, but are counted with them
    estimate = layers * (per_layer + beside / len(seconds))
    print(
        f"{layers} layers: planned {planned:.0f} s, by these layers at most {estimate:.0f} s "
        f"({beside:.1f} s beside the layers of this run)"
    )
    return {"layers": layers, "seconds": estimate, "planned": planned}


def _show(what: str, planned: dict[str, int], measured: int) -> dict[str, int]:
    terms = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in planned.items())
    total = sum(planned.values())
    print(f"{what}, MiB: planned {total / 2**20:.0f} ({terms}), measured {measured / 2**20:.0f}")
    return {"planned": total, "measured": measured}


def _text(tokens: int, length: int, vocabulary: int) -> CalibrationData:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocabulary, (tokens // length, length), generator=generator).tolist()
    return CalibrationData(tuple(map(tuple, ids)), "random", 0, (("random", len(ids)),))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gpu_used(device: torch.device) -> int:
    """What the process takes of the GPU before the run, alone on it."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


if __name__ == "__main__":
    main()
