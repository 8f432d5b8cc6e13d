"""A GGUF file's vocabulary gives the tokenizer it was made of (case Q27)."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.checkpoint.files import write_json
from qinfer.checkpoint.gguf_tokenizer import make_tokenizer
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def sentencepiece_metadata(folder: Path, **changes: Any) -> dict[str, Any]:
    """The vocabulary of the tiny SentencePiece tokenizer with scores by rank and no merges."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    return {
        "general.architecture": "llama",
        "llama.context_length": 256,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds + [NORMAL] * (len(tokens) - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def byte_level_metadata(pre: str, **changes: Any) -> dict[str, Any]:
    letters = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    letters += [chr(0x100 + i) for i in range(256 - len(letters))]
    merges = ["Ġ Ġ", "Ċ Ċ", "1 2", "12 3", "Ġ 1", "' s", "h e", "t he", "Ġ the", "' S"]
    made = ["".join(merge.split()) for merge in merges]
    tokens = [*letters, *made, "<|end|>", "<think>", "[PAD268]", "[PAD269]"]
    kinds = [NORMAL] * (len(tokens) - 4) + [CONTROL, USER_DEFINED, UNUSED, UNUSED]
    return {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        **changes,
    }


def build(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    tokenizer, config = make_tokenizer(metadata)
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", config)
    return Tokenizer.load(folder)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_str(i) for i in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def pair(sentencepiece_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    rebuilt = build(sentencepiece_metadata(sentencepiece_folder), tmp_path_factory.mktemp("rebuilt"))
    return Tokenizer.load(sentencepiece_folder), rebuilt


@settings(max_examples=150)
@given(st.text(st.sampled_from("the dinglerat <s>é\n0"), max_size=24))
def test_q27_sentencepiece_gives_the_sources_ids(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    source, rebuilt = pair
    ids = source.encode(text)
    assert rebuilt.encode(text) == ids
    assert rebuilt.decode(ids) == source.decode(ids)


def test_q27_sentencepiece_merges_by_score(pair: tuple[Tokenizer, Tokenizer]) -> None:
    source, rebuilt = pair
    assert words(rebuilt, "the dinge") == words(source, "the dinge") == ["<s>", " the", " ", "ding", "e"]
    assert rebuilt.hf.unk_token == "<unk>"
    assert rebuilt.leading_spaces == 1


@pytest.mark.parametrize("add", [True, False])
def test_q27_add_bos_token_is_honoured(add: bool, sentencepiece_folder: Path, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece_folder, **{"tokenizer.ggml.add_bos_token": add})
    tokenizer = build(metadata, tmp_path)
    assert tokenizer.adds_bos is add
    assert tokenizer.encode("the")[:1] == (
        [1] if add else tokenizer.encode("the", add_special_tokens=False)[:1]
    )


def test_q27_gemma_merges_by_position_and_adds_no_space(sentencepiece_folder: Path, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece_folder)
    metadata["general.architecture"] = "gemma2"
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"][::-1]  # lead astray
    metadata["tokenizer.ggml.tokens"] += ["  ", "   "]
    metadata["tokenizer.ggml.scores"] += [0.0, 0.0]
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED, USER_DEFINED]
    tokenizer = build(metadata, tmp_path)
    assert words(tokenizer, "the dinge") == ["<s>", "t", "he", " ", "ding", "e"]
    assert words(tokenizer, "a   b") == ["<s>", "a", "   ", "b"]
    assert tokenizer.leading_spaces == 0
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "the  12", ["the", " ", " ", "12"]),
        ("gpt-2", "123\n\n1", ["123", "\n", "\n", "1"]),
        ("smollm", "the  123\n\n1", ["the", "  ", "1", "2", "3", "\n\n", "1"]),
        ("refact", " 12", [" ", "1", "2"]),
        ("qwen2", "the's 123", ["the", "'s", " ", "1", "2", "3"]),
        ("qwen2", "the'S", ["the", "'S"]),
        ("gpt-2", "the'S", ["the", "'", "S"]),
        ("llama-bpe", " 123123", [" ", "123", "123"]),
        ("llama-bpe", "123123", ["123", "123"]),
        ("gpt-2", "123123", ["123", "123"]),
        ("tekken", "123", ["1", "2", "3"]),
        ("gpt-4o", "the's", ["the", "'s"]),
    ],
)
def test_q27_text_is_split_as_the_word_says(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    assert words(build(byte_level_metadata(pre), tmp_path), text) == expected


def test_q27_special_user_defined_and_padding_tokens(tmp_path: Path) -> None:
    tokenizer = build(byte_level_metadata("gpt-2"), tmp_path)
    assert words(tokenizer, "a<think>b<|end|>") == ["a", "<think>", "b", "<|end|>"]
    (end,) = tokenizer.encode("<|end|>")
    assert tokenizer.special_ids == {end}
    assert tokenizer.eos_token_ids == {end}
    assert tokenizer.vocab_size == 268  # 256 bytes, 10 merges, 2 added; the padding is none of it
    assert tokenizer.token_bytes(268) == b""
    assert not tokenizer.adds_bos


def test_q27_words_that_are_tokens_are_not_merged_up_to_for_llama3(tmp_path: Path) -> None:
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"][-2] = "zebra"  # a token that no merge makes
    metadata["tokenizer.ggml.token_type"][-2] = NORMAL
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert words(build(metadata, tmp_path / "a"), "zebra") == ["zebra"]
    metadata["tokenizer.ggml.pre"] = "dbrx"
    assert words(build(metadata, tmp_path / "b"), "zebra") == list("zebra")


def test_q27_composed_and_decomposed_letters_are_one_for_qwen(tmp_path: Path) -> None:
    tokenizer = build(byte_level_metadata("qwen2"), tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize("name", ["bos", "eos", "unknown", "padding"])
def test_q27_special_id_beyond_the_vocabulary_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}_token_id 270 is beyond the 270 tokens"):
        make_tokenizer(byte_level_metadata("gpt-2", **{f"tokenizer.ggml.{name}_token_id": 270}))


def test_unknown_kinds_are_refused_by_name() -> None:
    for pre in ("default", "hyperbpe", None):
        with pytest.raises(UnsupportedModelError, match=f"{pre!r} is not known.*known: gpt-2, smollm"):
            make_tokenizer(byte_level_metadata("gpt-2") | {"tokenizer.ggml.pre": pre})
    with pytest.raises(UnsupportedModelError, match="'rwkv' is not supported; gpt2 and llama are"):
        make_tokenizer(byte_level_metadata("gpt-2") | {"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        make_tokenizer({"general.architecture": "llama"})


def test_result_is_what_the_tokenizers_library_writes_itself(tmp_path: Path) -> None:
    """The file survives a round trip through the library, so nothing in it was ignored or defaulted."""
    tokenizer, _ = make_tokenizer(byte_level_metadata("smollm"))
    assert json.loads(tokenizers.Tokenizer.from_str(json.dumps(tokenizer)).to_str()) == tokenizer
