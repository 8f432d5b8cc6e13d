"""The bodies that hold a conversation: messages, and how the model's template is to write them.

`Conversation` is what chat and /tokenize have in common; `ChatRequest` is /v1/chat/completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from qinfer.server.protocol import Count, GenerationRequest, Text, list_or_not

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


class Message(BaseModel):
    """One turn of a conversation; what a template may read beside role and content is kept."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Content | None = None

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
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {"role": self.role, "content": content or "", **extra}


class Conversation(BaseModel):
    """Messages and what the template makes of them."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    tools: list[Any] | None = None
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
        if self.tools is not None and not self.tools:
            raise ValueError("tools must not be an empty list: leave it out")
        return self


class ChatRequest(Conversation, GenerationRequest):
    """POST /v1/chat/completions."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _asks_for_what_goes_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.tools is None and self.tool_choice not in (None, "none"):
            raise ValueError("tool_choice needs tools")
        return self

    def refuse_absent(self) -> None:
        """Raises NotImplementedError for a feature that is asked for and that qinfer does not have."""
        super().refuse_absent()
        if self.tools and self.tool_choice != "none":
            raise NotImplementedError("qinfer does not have tools (tools)")
