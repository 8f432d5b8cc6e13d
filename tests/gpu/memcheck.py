"""The tests of kernels on a GPU under compute-sanitizer's memcheck, several processes at a time.

    python tests/gpu/memcheck.py [-n 12] [--seconds 600] [--match w4a16]

Tests that capture graphs are left out: the sanitizer cannot follow them. The others are shuffled, by the same
seed each time, and go in batches to processes of their own; none begins after `--seconds`. Prints what each
batch came to, then how many tests passed of how many, and every finding; exits 1 where there is one, or where
a test failed.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = ("engine", "graphs", "loading", "memory", "paged_graphs", "two_servers")  # files of tests of engines
BATCH = 12  # tests of a process: it takes some ten seconds to start under the sanitizer
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")


def tests(match: str) -> list[str]:
    """Names of the tests that run under the sanitizer, in a random order that is always the same."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "tests/gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    left_out = tuple(f"tests/gpu/test_{name}.py" for name in GRAPHS)
    found = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(left_out)]
    found = [line for line in found if match in line and not re.search("graph|captured", line.split("::")[1])]
    random.Random(0).shuffle(found)
    return found


def run(names: list[str], end: float) -> tuple[int, list[str]]:
    """How many of these passed, and what the sanitizer found or pytest said of the others."""
    if time.monotonic() > end:
        return 0, []
    with tempfile.TemporaryDirectory() as folder:
        listed, log = Path(folder) / "tests", Path(folder) / "log"
        listed.write_text("\n".join(names))
        checked = ["compute-sanitizer", "--tool", "memcheck", "--log-file", str(log)]
        done = subprocess.run(
            [*checked, *PYTEST, f"@{listed}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        said = log.read_text()
    passed = int(found[1]) if (found := re.search(r"(\d+) passed", done.stdout)) else 0
    findings = [] if "ERROR SUMMARY: 0 errors" in said else [said]
    if passed < len(names):
        findings.append(done.stdout[-3000:])
    print(f"{passed} of {len(names)} passed, {'nothing' if not findings else 'SOMETHING'} found", flush=True)
    return passed, findings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=12, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--match", default="", help="part of the tests' names")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the path: it comes with the CUDA toolkit")
    end = time.monotonic() + arguments.seconds
    names = tests(arguments.match)
    batches = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
    with ThreadPoolExecutor(arguments.n) as threads:
        results = list(threads.map(lambda batch: run(batch, end), batches))
    findings = [finding for _, found in results for finding in found]
    print(f"{sum(passed for passed, _ in results)} of {len(names)} tests passed, {len(findings)} findings")
    print(*findings, sep="\n")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
