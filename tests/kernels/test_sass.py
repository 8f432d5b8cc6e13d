"""The machine code of every committed configuration, compiled for a Hopper GPU that need not be there.

Registers must not spill; kernels that ask for tensor cores must have their instructions inside a loop, and
where codes are unpacked in that loop, no conversion between integers and floats, or between floats, whose
unit has a quarter of the others' speed or less. Triton's wheel brings the compiler and the disassembler.

All of them take minutes. Without `slow` a few of each kernel are compiled.
"""

from __future__ import annotations

import collections
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    "activation_triton",
    "fused_sampling_triton",
    "norm_triton",
    "paged_attention_triton",
    "qkv_post_triton",
    "quantize_per_token_triton",
    "w4a16_triton",
    "w8a16_triton",
    "w8a8_fp8_block_triton",
    "w8a8_triton",
)
FEW = 2  # variants of each kernel
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)(.*)")
LABEL = re.compile(r"^(\.L_x_\d+):")


def test_every_module_with_kernels_is_here() -> None:
    have = {
        path.stem for path in (ROOT / "kernels").glob("*.py") if "\ndef offline_variants" in path.read_text()
    }
    assert have == set(MODULES)


def test_every_row_of_the_committed_table_is_among_the_variants() -> None:
    assert compiled("few")["rows without a variant"] == []


@pytest.mark.parametrize("module", MODULES)
def test_some_variants(module: str) -> None:
    judge(compiled("few")[module])


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_all_variants(module: str) -> None:
    judge(compiled("all")[module])


def judge(facts: list[dict[str, Any]]) -> None:
    assert facts
    for fact in facts:
        assert not fact["stack"], fact
        assert not fact["spills"], fact
        if fact["wants_tensor_cores"]:
            assert fact["loops"], fact
        for loop in fact["loops"]:
            # I2F.RP is how a division of integers begins, which a program's next tile may need
            slow = {name for name in loop if name.startswith(("I2F.", "F2F.")) and ".RP" not in name}
            assert not slow, (slow, fact)


@cache
def compiled(which: str) -> dict[str, list[Any]]:
    """What another process finds: in this one Triton interprets kernels, where there is no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__, which], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return facts


def variants(module: str) -> list[Any]:
    return list(importlib.import_module(f"qinfer.kernels.{module}").offline_variants())


def chosen(module: str, which: str) -> list[int]:
    """Places of the variants to compile: all, or of each kernel a few that lie far apart."""
    by_kernel = collections.defaultdict(list)
    for place, variant in enumerate(variants(module)):
        by_kernel[variant.kernel.__name__].append(place)
    if which == "all":
        return [place for places in by_kernel.values() for place in places]
    return sorted(
        {places[i * (len(places) - 1) // (FEW - 1)] for places in by_kernel.values() for i in range(FEW)}
    )


def rows_without_a_variant() -> list[str]:
    """Rows of the table that no module's variants ask for; to be called before any is imported."""
    from qinfer.kernels import tiles

    tile, asked = tiles.tile, set()

    def noted(op: str, *args: Any, **kwargs: Any) -> Any:
        entry = tile(op, *args, **kwargs)
        asked.add((op, json.dumps(entry)))
        return entry

    tiles.tile = noted  # modules import it from there
    for module in MODULES:
        variants(module)
    return [
        f"{op} {key} up to {upper}"
        for op, table in tiles._table("nvidia-h200").items()
        for key, rows in table.items()
        for upper, entry in rows
        if (op.removesuffix(" in parts"), json.dumps(entry)) not in asked
    ]


def examine(job: tuple[str, int]) -> dict[str, Any]:
    """Compiles a variant: its stack in bytes, spilling instructions, and loops around matrix instructions."""
    variant = variants(job[0])[job[1]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary(variant))
        usage = run_tool("cuobjdump", "-res-usage", str(path))
        code = run_tool("nvdisasm", "-c", str(path))
    loops = matrix_loops(code)
    names = [match[1] for match in map(INSTRUCTION.match, code.splitlines()) if match]
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "name": variant.name,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": [name for name in names if name.startswith(("STL", "LDL"))],
        "wants_tensor_cores": variant.wants_tensor_cores,
        "loops": loops,
    }


def binary(variant: Any) -> bytes:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    pointers = {name for name, kind in variant.signature.items() if kind.startswith("*")}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in (*pointers, *variant.aligned)}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    language = GluonASTSource if variant.kernel.is_gluon() else ASTSource
    source = language(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    cubin: bytes = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=dict(variant.options)
    ).asm["cubin"]
    return cubin


def run_tool(name: str, *arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def matrix_loops(code: str) -> list[dict[str, int]]:
    """Instructions by number, of each innermost loop that has any of the tensor cores."""
    lines = code.splitlines()
    labels = {match[1]: i for i, match in enumerate(map(LABEL.match, lines)) if match}
    spans = []
    for i, line in enumerate(lines):
        match = INSTRUCTION.match(line)
        target = re.search(r"\((\.L_x_\d+)\)", match[2]) if match and match[1].startswith("BRA") else None
        if target and labels.get(target[1], i) < i:
            spans.append((labels[target[1]], i))
    loops = []
    for start, end in sorted(spans, key=lambda span: span[1] - span[0]):
        names = [match[1] for match in map(INSTRUCTION.match, lines[start : end + 1]) if match]
        inner = any(start <= a and b <= end for a, b, _ in loops)
        if not inner and any("MMA" in name for name in names):
            loops.append((start, end, collections.Counter(names)))
    return [dict(counts) for _, _, counts in loops]


if __name__ == "__main__":
    rest = rows_without_a_variant()
    jobs = [(module, place) for module in MODULES for place in chosen(module, sys.argv[1])]
    found: dict[str, list[dict[str, Any]]] = {module: [] for module in MODULES}
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for (name, _), fact in zip(jobs, pool.map(examine, jobs, chunksize=1), strict=True):
            found[name].append(fact)
    print(json.dumps({**found, "rows without a variant": rest}))
