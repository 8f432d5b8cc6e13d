"""The bodies that the OpenAI routes give, field by field in the order in which they are written.

Every answer is built from these models and written with `exclude_unset`: a field that was given as None is
written as null, one that was not given is absent, which is how OpenAI tells "no value" from "not asked for".
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Body(BaseModel):
    """Anything written to a client."""

    def json_text(self) -> str:
        """JSON; NaN and infinity cannot occur, logprobs are floored before."""
        return self.model_dump_json(exclude_unset=True)


class Usage(Body):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class CompletionLogprobs(Body):
    """/v1/completions: four parallel lists over tokens; offsets count characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Body):
    """One choice, whole or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class Completion(Body):
    """/v1/completions, whole or a chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None


class TopLogprob(Body):
    """A token that could have been: its text, its bytes, its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    """/v1/chat/completions: one entry per token."""

    content: list[TokenLogprob]


class CalledFunction(Body):
    """A function's name, in a stream once, and its arguments as JSON, in a stream piece by piece."""

    name: str | None = None
    arguments: str


class ToolCall(Body):
    """A call of a tool; `index` in a stream only, where later pieces have nothing but that and arguments."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    """A whole answer, or what a chunk adds to it."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Body):
    """One choice: `message` when whole, `delta` in a chunk."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Chat(Body):
    """/v1/chat/completions, whole or a chunk."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class Permission(Body):
    """What OpenAI once said of every model, and some clients still read."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class ModelCard(Body):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Permission]


class ModelList(Body):
    """/v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
