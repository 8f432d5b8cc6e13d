"""The Python face: signatures first; the body follows within the hour."""

from __future__ import annotations

from typing import Any

from qinfer.config import ModelConfig
from qinfer.engine.engine import Engine
from qinfer.evals.certificate import GateStatus
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.tokenizer import Tokenizer


class LLM:
    """A model with an engine in this process; keywords as in vLLM, `engine_options` are those of EngineOptions."""

    engine: Engine
    gate: GateStatus
    config: ModelConfig
    served_model_names: tuple[str, ...]

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        seed: int = 0,
        allow_ungated: bool = False,
        chat_template: str | None = None,
        served_model_name: str | list[str] | None = None,
        hf_token: str | None = None,
        skip_tokenizer_init: bool = False,
        **engine_options: Any,
    ) -> None: ...

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = True, **kw: Any
    ) -> list[RequestOutput]: ...

    def chat(
        self, messages: Any, sampling_params: Any = None, use_tqdm: Any = True, **kw: Any
    ) -> list[RequestOutput]: ...

    def get_tokenizer(self) -> Tokenizer: ...

    def get_default_sampling_params(self) -> SamplingParams: ...
