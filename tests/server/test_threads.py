"""Who computes in parallel: the thread that runs an engine and no other."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from qinfer import llm
from qinfer.async_llm import AsyncEngineArgs, AsyncLLM
from qinfer.sampling_params import SamplingParams

THREADS = """
import os, torch
from qinfer.engine_thread import threads_left_to_the_engine
count = lambda: len(os.listdir("/proc/self/task"))
numbers = torch.empty(1 << 22)
before = count()
with threads_left_to_the_engine():
    numbers + 1
alone = count()
numbers + 1
print(before, alone, count(), torch.get_num_threads())
"""


def test_loading_within_starts_no_thread_and_changes_no_setting():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, check=True
    )
    before, alone, parallel, setting = map(int, done.stdout.split())
    assert (alone, parallel, setting) == (before, before + 1, 2)


def test_a_model_is_loaded_by_one_thread_and_run_by_all(model_dir, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, int] = {}
    real = llm.LLM.__init__

    def init(self: Any, *args: Any, **keywords: Any) -> None:
        seen["loading"] = torch.get_num_threads()
        real(self, *args, **keywords)
        step = self.engine.step

        def spied() -> Any:
            seen["running"] = torch.get_num_threads()
            return step()

        self.engine.step = spied

    monkeypatch.setattr(llm.LLM, "__init__", init)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model_dir), num_kv_blocks=64))

        async def ask() -> None:
            async for _ in engine.generate("A", SamplingParams(max_tokens=2), "r"):
                pass

        try:
            asyncio.run(ask())
        finally:
            engine.shutdown()
        assert seen == {"loading": 1, "running": 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
