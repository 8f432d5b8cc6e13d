"""tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary.

The file lists tokens, their kinds, merges or scores, and names in one word (`tokenizer.ggml.pre`) how text is
split before merging. That word matters: with the wrong split the same text gets other ids, and the model
quietly does worse. So every known word has its published split here, and an unknown one is an error.

Two models of tokenizer occur: `gpt2`, byte-level BPE with merges as in the original, and `llama`,
SentencePiece BPE, whose merges are recovered: a token can come from any split of it into two tokens, and
tokens of higher score merge first (Gemma: those listed earlier).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qinfer.errors import CheckpointError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")  # llama.cpp fills the vocabulary up to the embedding's rows
_SPACE = "\u2581"

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _CASED_TAIL
_GPT4O = "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED) + r"|\p{N}{1,3}" + _CASED_TAIL


class _Split(NamedTuple):
    """How a byte-level tokenizer cuts text; without a pattern, as GPT-2 does."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words_first: bool = False  # a word that is a token is not merged up to
    begins: bool = False  # a text begins with BOS unless the file says otherwise
    normalizer: str | None = None


_SPLITS = {
    "gpt-2": _Split(),
    **dict.fromkeys(("smollm", "refact", "starcoder"), _Split(single_digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), _Split(_LLAMA3, whole_words_first=True, begins=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split(_QWEN2, normalizer="NFC")),
    "tekken": _Split(_TEKKEN, whole_words_first=True, begins=True),
    "gpt-4o": _Split(_GPT4O),
}


class _Vocabulary(NamedTuple):
    tokens: list[str]
    kinds: list[int]
    special: dict[str, int]  # "bos" -> id


def make_tokenizer(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) without the chat template.

    Raises UnsupportedModelError for a kind or a split of tokenizer that is not known, CheckpointError for a
    special token's id beyond the vocabulary.
    """
    vocabulary = _read_vocabulary(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(metadata, vocabulary)
    else:
        raise UnsupportedModelError(f"GGUF tokenizer {kind!r} is not supported; gpt2 and llama are")
    special = {name: vocabulary.tokens[i] for name, i in vocabulary.special.items()}
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", begins)) and "bos" in special
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos" in special
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        **tokenizer,
        "post_processor": _template(
            [(special["bos"], vocabulary.special["bos"])] if add_bos else [],
            [(special["eos"], vocabulary.special["eos"])] if add_eos else [],
        ),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        **{f"{name}_token": special.get(name) for name in ("bos", "eos", "unk", "pad")},
    }
    return tokenizer, config


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise CheckpointError(
                    f"GGUF metadata: {key}_token_id {token_id} is beyond the {len(tokens)} tokens"
                )
            special[name] = int(token_id)
    return _Vocabulary(list(tokens), list(kinds), special)


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """(parts of tokenizer.json, whether a text begins with BOS by default)."""
    word = metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(str(word))
    if split is None:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {word!r} is not known, so text would be split wrongly; "
            f"known: {', '.join(_SPLITS)}"
        )
    by_regex = split.pattern is None
    steps: list[dict[str, Any]] = []
    if split.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if not by_regex:
        cut = {"Regex": split.pattern}
        steps.append({"type": "Split", "pattern": cut, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": by_regex})
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    parts = {
        "added_tokens": _added_tokens(vocabulary, vocabulary.tokens),
        "normalizer": None if split.normalizer is None else {"type": split.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(_ids(vocabulary, vocabulary.tokens), merges, ignore_merges=split.whole_words_first),
    }
    return parts, split.begins


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """(parts of tokenizer.json, whether a text begins with BOS by default)."""
    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    tokens = vocabulary.tokens
    if gemma:  # its runs of spaces are listed as spaces
        tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    ids = _ids(vocabulary, tokens)
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    rank = (lambda i: i) if gemma else (lambda i: -scores[i])
    mergeable = [i for i, kind in enumerate(vocabulary.kinds) if kind in (_NORMAL, _USER_DEFINED)]
    merges = _recover_merges(ids, [tokens[i] for i in sorted(mergeable, key=rank)])
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.special.get("unk")
    model = _bpe(ids, merges, byte_fallback=True, fuse_unk=True)
    if unknown is not None:
        model["unk_token"] = tokens[unknown]
    parts = {
        "added_tokens": _added_tokens(vocabulary, tokens),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return parts, True


def _ids(vocabulary: _Vocabulary, tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id, without the padding at the end."""
    return {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, vocabulary.kinds, strict=True))
        if not (kind == _UNUSED and _PADDING.fullmatch(token))
    }


def _added_tokens(vocabulary: _Vocabulary, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before it is split; those of control are special."""
    listed = enumerate(zip(vocabulary.tokens, tokens, vocabulary.kinds, strict=True))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, **plain, "special": kind != _USER_DEFINED}
        for i, (token, respelled, kind) in listed
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token == respelled
    ]


def _recover_merges(ids: Mapping[str, int], ranked: Sequence[str]) -> list[list[str]]:
    """All ways to make a token of two others, for the tokens that merge first, first."""
    return [
        [token[:i], token[i:]]
        for token in ranked
        for i in range(len(token) - 1, 0, -1)
        if token[:i] in ids and token[i:] in ids
    ]


def _bpe(ids: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": ids,
        "merges": merges,
    }


def _template(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> dict[str, Any]:
    """Special tokens around one text, and around each of two."""

    def around(name: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": type_id}}
        marks = [
            [{"SpecialToken": {"id": token, "type_id": type_id}} for token, _ in side]
            for side in (before, after)
        ]
        return [*marks[0], text, *marks[1]]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]}
            for token, token_id in (*before, *after)
        },
    }
