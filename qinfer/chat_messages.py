"""What a chat template is given: messages with plain text in them, and variables that are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qinfer.errors import UserError

Message = Mapping[str, Any]

# arguments of transformers' method that are not variables of a template
_NOT_TEMPLATE_VARIABLES = frozenset(
    {
        *("conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "messages", "self"),
    }
)


def read_template(chat_template: str) -> str:
    """The text of a template that is given inline or as a file; UserError where it is neither."""
    if any(mark in chat_template for mark in ("{{", "{%", "{#", "\n")):
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise UserError(
            f"chat_template {chat_template!r} is neither a file nor a Jinja template", "chat_template"
        )
    return path.read_text(encoding="utf-8")


def check_variables(variables: Mapping[str, Any]) -> None:
    """UserError for a variable that would be taken for an argument of the rendering itself."""
    if reserved := sorted(_NOT_TEMPLATE_VARIABLES & variables.keys()):
        raise UserError(f"{reserved[0]!r} is not a variable of a chat template", "chat_template_kwargs")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their content as one string each; UserError where that cannot be, and for none."""
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    if not plain:
        raise UserError("messages is empty: at least one message is needed", "messages")
    return plain


def _plain_message(i: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"messages[{i}] must be an object with a 'role' that is a string", "messages")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text_part(i, part) for part in content)
    if content is None and message["role"] == "assistant":
        content = ""  # it called tools and said nothing; templates join strings
    if content is None:
        raise UserError(f"messages[{i}] has no content: only an assistant's may be None", "messages")
    if not isinstance(content, str):
        raise UserError(
            f"messages[{i}].content must be a string or a list of text parts, not {type(content).__name__}",
            "messages",
        )
    return {**message, "content": content}


def _text_part(i: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"messages[{i}] has a part of type {kind!r}: only text is supported", "messages")
