"""The body of POST /v1/responses, and the chat request that it amounts to.

Responses are another way to write a conversation: items in place of messages, flat tools, a form under
`text`. All of it is turned into a `ChatRequest`, so that prompts, grammars and tools have one meaning.
Tools that OpenAI runs itself (searches, shells) do not exist here; the model is not told of them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError

from qinfer.server.chat_protocol import MAX_MESSAGES, ChatRequest
from qinfer.server.errors import ApiError, invalid
from qinfer.server.open_body import OpenBody
from qinfer.server.protocol import Count, Priority, Text, list_or_not
from qinfer.server.response_input import ChatMessages, Item, append_item


def _finite(value: Any) -> Any:
    """Python reads NaN and infinity, but the response that repeats them would be no JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("NaN and infinity are no JSON") from None
    return value


Repeatable = BeforeValidator(_finite)


class TextFormat(BaseModel):
    """The form of the text; a schema stands beside its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """How the text is to be."""

    format: TextFormat | None = None


class Reasoning(BaseModel):
    """How long to think, for templates that know of it."""

    effort: Text | None = None


class ResponsesRequest(OpenBody):
    """POST /v1/responses; fields that are not named here go to the chat request, as vLLM's do."""

    model: Text | None = None
    input: Annotated[
        Annotated[Text, Tag("str")]
        | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES), Tag("list")],
        Discriminator(
            list_or_not,
            custom_error_type="input_type",
            custom_error_message="must be text or items",
        ),
    ]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]] | None, Repeatable] = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | dict[str, Any] | None, Repeatable] = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextOptions | None, Repeatable] = None
    previous_response_id: Text | None = None
    store: bool | None = None
    metadata: Annotated[Annotated[dict[str, Any], Field(max_length=16)] | None, Repeatable] = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    background: bool | None = None
    priority: Priority = 0

    @property
    def unread(self) -> list[str]:
        """As of every body, but for those that the chat request reads."""
        return [name for name in super().unread if name not in _vllms(self)]

    def messages(self) -> ChatMessages:
        """The input as turns of a conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns: ChatMessages = []
        for item in self.input:
            append_item(turns, item)
        return turns

    def functions(self) -> list[dict[str, Any]]:
        """The tools that the client runs."""
        return [tool for tool in self.tools or () if tool.get("type") == "function"]

    def chat(self, history: ChatMessages) -> ChatRequest:
        """The same request of a chat that began with `history`; ApiError where it is none."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        functions = self.functions()
        choice = self.tool_choice if functions else None
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        known = {
            "messages": [*system, *history, *self.messages()],
            "tools": [{"type": "function", "function": _without_type(tool)} for tool in functions] or None,
            "tool_choice": choice,
            "response_format": self._format(),
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "logprobs": self.wants_logprobs,
        }
        same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "priority")
        body = {**_vllms(self), **known, **{name: getattr(self, name) for name in same}}
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
            failure = invalid(faults, body)
            raise ApiError(failure.status, failure.message, failure.param) from None

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        wanted = self.text.format if self.text else None
        form = wanted.model_dump(by_alias=True, exclude_unset=True) if wanted else {"type": "text"}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "store": self.store is not False,
            "text": {"format": form},
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in self.functions()],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
        }

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    def refuse_absent(self) -> None:
        """NotImplementedError for a feature that qinfer lacks, ApiError for what contradicts itself."""
        extra = self.model_extra or {}
        for name in ("conversation", "prompt"):
            if extra.get(name) is not None:
                raise NotImplementedError(f"qinfer does not have stored prompts and conversations ({name})")
        if self.background and self.store is False:
            raise ApiError(400, "a response in the background must be kept: leave out store=false", "store")

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        if wanted.schema_ is None:
            raise ApiError(400, "a format of type json_schema needs schema", "text.format.schema")
        return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}


def _vllms(request: ResponsesRequest) -> dict[str, Any]:
    """Fields of a chat request that this one has no place of its own for, such as `seed` and `top_k`."""
    mine = ResponsesRequest.model_fields.keys() | {"messages", "stream_options", "n", "echo", "user"}
    known = ChatRequest.model_fields.keys() - mine
    return {name: value for name, value in (request.model_extra or {}).items() if name in known}
