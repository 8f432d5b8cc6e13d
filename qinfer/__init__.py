"""qinfer: quantize a language model, have it judged, serve it.

    from qinfer import LLM, SamplingParams, quantize

    quantize("smollm2-135m-instruct", "small", scheme="int8")
    LLM("small").chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=20))

Names load on first use, so that importing the package costs nothing and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qinfer.async_llm import AsyncEngineArgs, AsyncLLM
    from qinfer.errors import (
        CheckpointError,
        EngineDeadError,
        GateError,
        QinferError,
        UnsupportedModelError,
        UserError,
    )
    from qinfer.jobs import evaluate, quantize
    from qinfer.llm import LLM
    from qinfer.llm_tasks import BeamSearchParams
    from qinfer.outputs import CompletionOutput, Logprob, RequestOutput
    from qinfer.sampling_params import SamplingParams
    from qinfer.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngineArgs": "async_llm",
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "llm_tasks",
    "CheckpointError": "errors",
    "CompletionOutput": "outputs",
    "EngineDeadError": "errors",
    "GateError": "errors",
    "LLM": "llm",
    "Logprob": "outputs",
    "QinferError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
    "UnsupportedModelError": "errors",
    "UserError": "errors",
    "evaluate": "jobs",
    "quantize": "jobs",
}

__all__ = [  # the public names; a test compares them with _HOMES and loads each
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CheckpointError",
    "CompletionOutput",
    "EngineDeadError",
    "GateError",
    "Logprob",
    "QinferError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedModelError",
    "UserError",
    "__version__",
    "evaluate",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qinfer' has no attribute {name!r}")
    value = getattr(import_module(f"qinfer.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
