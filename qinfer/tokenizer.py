"""Text to token ids and back, chat templates, and which ids end a text.

The tokenizer's own file, `tokenizer.json`, is what counts: it is loaded as it stands. (transformers 5 would
rebuild it from vocabulary and merges where `tokenizer_config.json` names a class such as GPT2Tokenizer, and
lose what the class does not know, for example SmolLM2's splitting of digits.) transformers adds what stands
in tokenizer_config.json: special tokens, whether a text begins with BOS, the chat template.

After loading, nothing here changes anything: truncation and padding are switched off once, and encoding goes
straight to the Rust object, which may be shared by threads as long as nobody alters it.

For the way back a token is a string of bytes (`token_bytes`), in the two spellings that all supported models
have: byte-level (GPT-2: each byte is a printable letter) and SentencePiece (U+2581 for a space, <0x0A> for a
byte). `qinfer.detokenizer` says why bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from qinfer.chat_messages import Message, check_variables, plain_messages, read_template
from qinfer.checkpoint.files import read_json
from qinfer.checkpoint.spelling import spelling_of
from qinfer.checkpoint.token_reach import token_reach
from qinfer.errors import CheckpointError, UnsupportedModelError, UserError

# a template is a program of the model's author, run on the caller's data: these are its ways to fail
_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, ValueError, TypeError, LookupError),
    *(AttributeError, ArithmeticError, RecursionError),
)


class Tokenizer:
    """One model's tokenizer; safe to share between threads.

    `vocab_size` is one more than the largest id. `eos_token_ids` is the union of what the tokenizer,
    config.json and generation_config.json say: chat models often name the end of a turn in one of them only.
    `special_ids` are hidden by skip_special_tokens. `leading_spaces`: how many spaces decoding drops at the
    very beginning of a text (SentencePiece: one). `hf` is the transformers object.
    """

    def __init__(
        self, hf: Any, *, more_eos_ids: Iterable[int] = (), chat_template: str | None = None
    ) -> None:
        self.hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        if chat_template is not None:
            hf.chat_template = chat_template
        self._spelling = spelling_of(self._backend)
        self.leading_spaces = self._spelling.leading_spaces
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values())
        self._reach = token_reach(self._backend, vocab)
        self.bos_token_id: int | None = hf.bos_token_id
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_token_ids = frozenset((*own, *more_eos_ids))
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.adds_bos = self.bos_token_id is not None and self.encode("a")[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, path: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Reads a checkpoint folder; `chat_template` is a file or inline Jinja and replaces the model's own.

        Raises CheckpointError where there is no tokenizer or it cannot be read, UnsupportedModelError for a
        kind of tokenizer that no supported model has.
        """
        path = Path(path)
        template = None if chat_template is None else read_template(chat_template)
        eos: list[int] = []
        for name in ("config.json", "generation_config.json"):
            if (path / name).is_file():
                eos += _eos_ids(path / name)
        return cls(_load_hf(path), more_eos_ids=eos, chat_template=template)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without a template of the caller's."""
        return bool(self.hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; names of special tokens in it become those tokens. UserError for lone surrogates."""
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character "
                    f"{error.start}: it is no valid Unicode; remove it",
                    "prompt",
                ) from None
        # as a batch of one: `encode` would hold the interpreter for the seconds that a long text takes
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """How many tokens `text` has at least, known from its length; 0 where that says nothing."""
        return self._reach.least_tokens(text)

    def to_json(self) -> str:
        """tokenizer.json as it is in use."""
        text: str = self._backend.to_str()
        return text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; ids that no token has are left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of what `render_chat` makes of the same arguments."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the model's template writes it, special tokens and all; `variables` are its own.

        A message's content is a string or a list of text parts, which are joined by newlines. UserError for
        messages that are malformed or that the template refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message needs add_generation_prompt=False: the last message goes on, "
                "so no new one begins",
                "continue_final_message",
            )
        check_variables(variables)
        if chat_template is None and not self.has_chat_template:
            raise UserError(
                "this model has no chat template: give one (chat_template, --chat-template) or send a plain "
                "prompt",
                "messages",
            )
        plain = plain_messages(messages)
        try:
            text: str = self.hf.apply_chat_template(
                plain,
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            raise UserError(f"the chat template refuses these messages: {error}", "messages") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token contributes to a text; empty for an id that no token has."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if token is None else self._spelling.to_bytes(token)
        return data

    def token_str(self, token_id: int) -> str:
        """The token's text, special tokens too; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def import_transformers() -> tuple[Any, Any]:
    """What loads a tokenizer.json, and what loads others; imported in seconds, by those who have a tokenizer.

    To load one imports it, and so does to unpickle one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    return PreTrainedTokenizerFast, AutoTokenizer


def _load_hf(path: Path) -> Any:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder, so no tokenizer can be read from it")
    if not has_tokenizer(path):
        raise CheckpointError(
            f"{path} holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json): copy it there"
        )
    with_file, by_name = import_transformers()
    loader = with_file if (path / "tokenizer.json").is_file() else by_name
    try:
        hf = loader.from_pretrained(str(path), local_files_only=True)
    # the Rust parser raises bare Exception for a malformed file
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {reason[0]}") from error
    if not hf.is_fast:
        raise UnsupportedModelError(
            f"the tokenizer in {path} is {type(hf).__name__}; it needs tokenizer.json"
        )
    return hf


def _eos_ids(file: Path) -> list[int]:
    """What a file says ends a text; CheckpointError where that is no token id."""
    raw = read_json(file)
    ids = raw.get("eos_token_id")
    inner = raw.get("text_config")
    if ids is None and isinstance(inner, Mapping):
        ids = inner.get("eos_token_id")
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(i) is int for i in found):
        raise CheckpointError(
            f"{file}: eos_token_id is {ids!r:.100}; it must be a token id or a list of them"
        )
    return found
