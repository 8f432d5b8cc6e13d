"""Tiny engines on random models, and a loop that runs one to the end."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

MakeEngine = Callable[..., Engine]
Generate = Callable[..., dict[str, RequestOutput]]


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Decoder, Tokenizer]]:
    """Loads the tiny model of a family, once per session."""

    @cache
    def load(family: str, **changes: Any) -> tuple[Decoder, Tokenizer]:
        folder: Path = tiny_model(family, tmp_path_factory.mktemp(family), **changes)
        return load_decoder(open_checkpoint(folder)), Tokenizer.load(folder)

    return load


@pytest.fixture
def make_engine(load_tiny: Callable[..., tuple[Decoder, Tokenizer]]) -> MakeEngine:
    """Makes an engine over the tiny Llama, or `family`; keywords are EngineOptions'."""

    def make(family: str = "llama3", runner: Any = None, kv_scales: Any = None, **options: Any) -> Engine:
        decoder, tokenizer = load_tiny(family)
        options = {"num_kv_blocks": 64, **options}
        return Engine(decoder, tokenizer, EngineOptions(**options), runner=runner, kv_scales=kv_scales)

    return make


@pytest.fixture
def generate() -> Generate:
    """Runs prompts (lists of ids) to the end and checks the pages after every step."""

    def run(
        engine: Engine,
        prompts: Sequence[list[int]],
        params: SamplingParams | list[SamplingParams],
        **add: Any,
    ) -> dict[str, RequestOutput]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            engine.add(str(i), prompt, own, **add)
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
            engine.pages.check([seq.pages for seq in engine.scheduler.running])
        return outputs

    return run
