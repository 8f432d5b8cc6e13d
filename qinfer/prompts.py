"""What callers may pass as prompts, conversations and parameters, and how the many become lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from qinfer.chat_messages import Message
from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]  # {"prompt": ...} or {"prompt_token_ids": ...}


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; UserError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(
            f"prompts is a {type(prompts).__name__}; it must be text, token ids, a prompt dict or a list "
            "of them",
            "prompts",
        )
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [cast(Prompt, prompts)]  # one prompt of ids
    return list(cast(Sequence[Prompt], prompts))


def text_and_ids(prompt: Prompt) -> tuple[str | None, Any]:
    """A prompt's text and its ids, of which one may be None: text to be encoded; UserError for neither."""
    text, ids = None, None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Iterable):
        ids = prompt
    if ids is None and not isinstance(text, str):
        raise UserError(
            'a prompt is text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}, '
            f"not {prompt!r:.100}",
            "prompt",
        )
    return text, ids


def conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several as a list; UserError for what is no list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UserError(
            f"messages is a {type(messages).__name__}; it must be a list of messages such as "
            '{"role": "user", "content": "Hello"}, or a list of such lists',
            "messages",
        )
    if messages and isinstance(messages[0], Mapping):
        return [cast(Sequence[Message], messages)]
    return list(cast(Sequence[Sequence[Message]], messages))


def params_list(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts, from one for all or one each; UserError for other than that."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise UserError(
            f"sampling_params must be a SamplingParams or a list of them, not {params!r:.100}",
            "sampling_params",
        )
    if len(params) != count:
        raise UserError(
            f"{count} prompts but {len(params)} sampling_params: give one for all or one each",
            "sampling_params",
        )
    return list(params)
