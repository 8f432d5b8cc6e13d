"""One GPU, many test processes: what a test leaves is given back, and the largest tests wait for each other.

PyTorch keeps the memory of freed tensors for its own process, so that under `pytest -n 14` the first
processes to run large tests would leave nothing to the others. After each test all of it goes back.

A test marked `large_gpu_memory` needs more than 4 GiB at once (offsets past 2^31 elements, a pool that fills
its share of the GPU). One of them runs at a time, whatever the number of processes.
"""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large_gpu_memory: needs more than 4 GiB; such tests run one by one")


@pytest.fixture(autouse=True)
def _memory_given_back(request: pytest.FixtureRequest, common_folder: Path) -> Iterator[None]:
    """Goes before all other fixtures of a test, and so ends after them, when their tensors are gone."""
    with (common_folder / "large_gpu_memory.lock").open("w") as lock:
        if request.node.get_closest_marker("large_gpu_memory"):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run share: pytest-xdist gives each process one inside it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
