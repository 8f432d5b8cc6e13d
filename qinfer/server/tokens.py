"""/tokenize, /detokenize, /tokenizer_info: what a client needs to count and cut as the server does.

/tokenize takes a text, or messages, which the chat template writes out first. Texts may be longer than the
context: counting them is what a client asks for.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from qinfer.server.chat_protocol import Conversation
from qinfer.server.conversation import rendered
from qinfer.server.errors import ApiError
from qinfer.server.open_body import OpenBody
from qinfer.server.protocol import Text, TokenIds
from qinfer.server.state import ServerState
from qinfer.server.wire import Body


class TokenizeText(OpenBody):
    """POST /tokenize with a text."""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeMessages(Conversation):
    """POST /tokenize with messages."""

    model: Text | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


def _kind(body: Any) -> str:
    return "chat" if isinstance(body, dict) and "messages" in body else "text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeMessages, Tag("chat")], Discriminator(_kind)
]


class DetokenizeRequest(OpenBody):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class Tokenized(Body):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Body):
    """Of /detokenize; special tokens are written out."""

    prompt: str


class TokenizerInfo(Body):
    """Of /tokenizer_info; None: the tokenizer has no such token, or no template."""

    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None


async def tokenize(state: ServerState, request: TokenizeText | TokenizeMessages) -> Tokenized:
    """Ids of a text or conversation, and their texts where the client wants them."""
    state.check_model(request.model)
    tokenizer = state.engine.tokenizer

    def work() -> Tokenized:
        text = request.prompt if isinstance(request, TokenizeText) else rendered(state, request)
        ids = tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
        strings = [tokenizer.token_str(i) for i in ids] if request.return_token_strs else None
        return Tokenized(
            count=len(ids), max_model_len=state.engine.max_model_len, tokens=ids, token_strs=strings
        )

    return await asyncio.to_thread(work)  # a long text must not hold up every stream


async def detokenize(state: ServerState, request: DetokenizeRequest) -> Detokenized:
    """The text of ids; ApiError for one that the model does not have."""
    state.check_model(request.model)
    size = state.engine.vocab_size
    for token in request.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"token id {token} is not in the vocabulary of {size}", "tokens")
    decode = state.engine.tokenizer.decode
    return Detokenized(prompt=await asyncio.to_thread(decode, request.tokens, skip_special_tokens=False))


def info(state: ServerState) -> TokenizerInfo:
    """What the tokenizer's own files say of it."""
    tokenizer = state.engine.tokenizer
    hf = tokenizer.hf
    return TokenizerInfo(
        tokenizer_class=type(hf).__name__,
        vocab_size=tokenizer.vocab_size,
        max_model_len=state.engine.max_model_len,
        bos_token=hf.bos_token,
        eos_token=hf.eos_token,
        pad_token=hf.pad_token,
        unk_token=hf.unk_token,
        add_bos_token=tokenizer.adds_bos,
        chat_template=hf.chat_template,
    )
