"""The bodies that hold a conversation: messages, and how the model's template is to write them.

`Conversation` is what chat and /tokenize have in common; `ChatRequest` is /v1/chat/completions.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from qinfer.server.open_body import OpenBody, check_depth
from qinfer.server.protocol import Count, GenerationRequest, Text, list_or_not
from qinfer.server.tools import NamedChoice, ToolChoice, Tools, check_choice, form_of_calls
from qinfer.structured_outputs import StructuredOutputsParams

MAX_MESSAGES = 4096


class TextPart(BaseModel):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("str")] | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("list")],
    Discriminator(
        list_or_not,
        custom_error_type="content_type",
        custom_error_message="must be text or a list of text parts",
    ),
]


class PastFunction(BaseModel):
    """What was called, with the arguments as the text that the model wrote."""

    name: Text
    arguments: Text = "{}"

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("arguments must be the text of a JSON object")
        check_depth(value)
        return text


class PastCall(BaseModel):
    """A call of a tool in a turn of the assistant's."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: PastFunction

    def for_template(self) -> dict[str, Any]:
        """As templates read it: with the arguments as an object, which they write in their own way."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(BaseModel):
    """One turn of a conversation; what a template may read beside role and content is kept."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Content | None = None
    tool_calls: list[PastCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"the content of a {self.role!r:.70} message must not be null")
        return self

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates read it: parts joined by newlines, null content as the empty string."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_calls:
            more["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return {"role": self.role, "content": content or "", **more}


class Conversation(OpenBody):
    """Messages and what the template makes of them."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    reasoning_effort: Text | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _ends_one_way(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        check_choice(self.tools, None)
        return self

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools as the template shows them to the model."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class ChatRequest(Conversation, GenerationRequest):
    """POST /v1/chat/completions."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _asks_for_what_goes_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        check_choice(self.tools, self.tool_choice)
        return self

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedChoice:
        """The tool choice that is meant: "auto" where there are tools."""
        return "none" if self.tools is None else self.tool_choice or "auto"

    @property
    def parallel(self) -> bool:
        """Whether one answer may hold more than one call."""
        return self.parallel_tool_calls is not False

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """None where the model is not to call any."""
        return None if self.choice == "none" else super().offered_tools()

    def field_of_form(self, kind: str) -> str:
        """`tools` where they are part of the grammar."""
        return "tools" if self.choice != "none" else super().field_of_form(kind)

    def form(self) -> StructuredOutputsParams | None:
        """The form of calls where the choice demands some, else that of the text."""
        return form_of_calls(self.tools or (), self.choice, parallel=self.parallel) or super().form()
