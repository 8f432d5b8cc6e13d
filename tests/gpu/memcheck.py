"""The tests of kernels on a GPU under compute-sanitizer's memcheck, several processes at a time.

    python tests/gpu/memcheck.py [-n 12] [--seconds 600] [--begin 20] [--match w4a16]

Tests that capture graphs are left out: the sanitizer cannot follow them. The others are shuffled, by the same
seed each time, and go in batches to processes of their own; none begins after `--seconds`, and another run
goes on with `--begin` and the first batch that was not run. Prints what each batch came to and every finding,
then how many tests passed of how many; exits 1 where there is a finding, or where a test failed.
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


def run(batch: int, names: list[str], end: float) -> tuple[int, bool]:
    """How many of these passed, and whether nothing was found."""
    if time.monotonic() > end:
        print(f"batch {batch}: not run", flush=True)
        return 0, True
    with tempfile.TemporaryDirectory() as folder:
        listed, log = Path(folder) / "tests", Path(folder) / "log"
        listed.write_text("\n".join(names))
        checked = ["compute-sanitizer", "--tool", "memcheck", "--log-file", str(log)]
        done = subprocess.run(
            [*checked, *PYTEST, f"@{listed}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        said = log.read_text()
    counted = re.search(r"(\d+) passed", done.stdout)
    passed = int(counted[1]) if counted else 0
    lines = [f"batch {batch}: {passed} of {len(names)} passed"]
    if "ERROR SUMMARY: 0 errors" not in said:
        lines.append(said)
    if passed < len(names):
        lines.append(done.stdout[-3000:])
    print("\n".join(lines), flush=True)
    return passed, len(lines) == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=12, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--begin", type=int, default=0, help="the first batch, of all")
    parser.add_argument("--match", default="", help="part of the tests' names")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the path: it comes with the CUDA toolkit")
    end = time.monotonic() + arguments.seconds
    names = tests(arguments.match)
    batches = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
    with ThreadPoolExecutor(arguments.n) as threads:
        todo = range(arguments.begin, len(batches))
        results = list(threads.map(lambda batch: run(batch, batches[batch], end), todo))
    print(f"{sum(passed for passed, _ in results)} of {len(names)} tests passed")
    sys.exit(0 if all(clean for _, clean in results) else 1)


if __name__ == "__main__":
    main()
