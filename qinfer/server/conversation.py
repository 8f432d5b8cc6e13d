"""A conversation as the model's own chat template writes it, in tokens."""

from __future__ import annotations

from typing import Any

from qinfer.server.answer import encoded, truncated
from qinfer.server.chat_protocol import Conversation, Message
from qinfer.server.errors import ApiError
from qinfer.server.state import ServerState

# what a request has fields of its own for; a template variable of that name would contradict them
_RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template"}
)


def prompt_of(
    state: ServerState, talk: Conversation, *, keep: int | None = None, add_special_tokens: bool = False
) -> list[int]:
    """The prompt's tokens, of which `truncated` keeps the last `keep`; ApiError or UserError without any."""
    tokenizer = state.engine.tokenizer
    token_ids = encoded(state, rendered(state, talk), keep, add_special_tokens=False)
    if add_special_tokens:
        token_ids = tokenizer.encode("") + token_ids
    token_ids = truncated(token_ids, keep, state.engine.max_model_len)
    if not token_ids:
        raise ApiError(400, "the template makes no token of these messages", "messages")
    return token_ids


def rendered(state: ServerState, talk: Conversation) -> str:
    """The prompt's text; ApiError or UserError for what the template, or the operator, refuses."""
    if talk.chat_template is not None and not state.options.trust_request_chat_template:
        raise ApiError(400, "chat_template in a request is refused: a template is a program", "chat_template")
    template = talk.chat_template or str(state.engine.tokenizer.hf.chat_template)
    knows_developer = "developer" in template  # others would write the role's name, or leave the turn out
    return state.engine.tokenizer.render_chat(
        [_turn(message, knows_developer=knows_developer) for message in talk.messages],
        add_generation_prompt=talk.add_generation_prompt,
        continue_final_message=talk.continue_final_message,
        tools=talk.offered_tools(),
        chat_template=talk.chat_template,
        **_template_variables(talk),
    )


def _turn(message: Message, *, knows_developer: bool) -> dict[str, Any]:
    turn = message.for_template()
    if turn["role"] == "developer" and not knows_developer:
        turn["role"] = "system"
    return turn


def _template_variables(talk: Conversation) -> dict[str, Any]:
    variables = dict(talk.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & variables.keys()):
        raise ApiError(400, f"{reserved[0]} is a field of its own", "chat_template_kwargs")
    for name in ("documents", "reasoning_effort"):
        if (value := getattr(talk, name)) is not None:
            variables[name] = value
    return variables
