"""The items that the input of a response may hold, and the turns of a conversation that they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from qinfer.server.protocol import Text, list_or_not

ChatMessages = list[dict[str, Any]]


class TextPart(BaseModel):
    """One part of an item's text."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


Parts = Annotated[
    Annotated[Text, Tag("str")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("list")],
    Discriminator(
        list_or_not,
        custom_error_type="parts_type",
        custom_error_message="must be text or text parts",
    ),
]


class MessageItem(BaseModel):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Parts


class CallItem(BaseModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class ResultItem(BaseModel):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts


class ReasoningItem(BaseModel):
    """Thoughts of another model's; they are left out."""

    type: Literal["reasoning"]


def _item_type(value: Any) -> str:
    return str(value.get("type") or "message") if isinstance(value, dict) else type(value).__name__


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="must be a message, function_call, function_call_output or reasoning item",
    ),
]


def append_item(turns: ChatMessages, item: Any) -> None:
    """Adds an item; calls belong to the assistant's turn that they follow."""
    match item:
        case MessageItem():
            turns.append({"role": item.role, "content": _joined(item.content)})
        case CallItem():
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turns[-1].setdefault("tool_calls", []).append(call)
        case ResultItem():
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})


def _joined(parts: str | list[TextPart]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
