"""A text's length bounds the number of its tokens from below, and only where it really does (case H02)."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from qinfer.checkpoint.spelling import byte_letters
from qinfer.checkpoint.token_reach import TokenReach, token_reach

LETTERS = byte_letters()
UTF8_NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))  # published vocabularies lack them
CONTROLS = "\x04\x06\x13"  # and SmolLM2's lacks these
SWALLOWING = AddedToken("<|end|>", rstrip=True, lstrip=True, special=True, normalized=False)
WIDE = unicodedata.normalize("NFD", "\u1f82")  # four code points that NFC makes one of


def byte_level(
    *, without: tuple[int, ...] = (), spaces: int = 4, added: tuple[AddedToken, ...] = ()
) -> Tokenizer:
    """A byte-level BPE whose longest tokens are runs of spaces."""
    vocab = {letter: i for i, letter in enumerate(LETTERS) if i not in without}
    space, merges, run = LETTERS[0x20], [], 1
    while run < spaces:
        merges.append((space * run, space * run))
        run *= 2
        vocab[space * run] = 300 + run
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_tokens(list(added))
    return backend


def byte_fallback(*, fuse_unk: bool = True, without: tuple[int, ...] = ()) -> Tokenizer:
    names = [f"<0x{byte:02X}>" for byte in range(256) if byte not in without]
    vocab = {name: i for i, name in enumerate(["<unk>", *names, "\u2581", "a"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return backend


def reach(backend: Tokenizer) -> TokenReach:
    return token_reach(backend, backend.get_vocab(with_added_tokens=True))


def nfc() -> Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def shorter() -> Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.Replace("word", "w")
    return backend


BOUNDED = {
    "byte-level": byte_level(),
    "no token for some bytes": byte_level(without=(*UTF8_NEVER, *map(ord, CONTROLS))),
    "swallowing": byte_level(added=(SWALLOWING,)),
    "NFC": nfc(),
    "a shorter text": shorter(),
    "byte fallback": byte_fallback(),
}
PIECES = ["word ", " " * 9, "\t\u2003\n", "<|end|>", WIDE, "\U0001f60a", CONTROLS, "a", "\x85", "\U000fffff"]


@pytest.mark.parametrize("name", BOUNDED)
@given(
    parts=st.lists(st.tuples(st.sampled_from(PIECES) | st.text(max_size=6), st.integers(1, 30)), max_size=6)
)
def test_h02_no_text_has_fewer_tokens_than_the_bound(name: str, parts: list[tuple[str, int]]) -> None:
    backend = BOUNDED[name]
    text = "".join(piece * times for piece, times in parts)
    assert reach(backend).least_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("backend", "text", "least"),
    [
        (byte_level(), " " * 1000, 250),  # the bound is met: four spaces are a token
        (byte_level(spaces=16), " " * 1000, 63),
        (byte_level(added=(SWALLOWING,)), "<|end|>" + " " * 1000, 1),
        (byte_level(added=(SWALLOWING,)), "<|end|>" + "a" * 693, 100),
        (byte_level(without=(*UTF8_NEVER, 4)), "\x04" * 1000 + "a" * 8, 2),
        (nfc(), "a" * 1000, 250),
        (nfc(), WIDE * 1000, 250),
        (shorter(), "word" * 1000, 250),
        (byte_level(), "", 0),
    ],
)
def test_the_bound_of_texts_whose_tokens_are_known(backend: Tokenizer, text: str, least: int) -> None:
    assert reach(backend).least_tokens(text) == least


def changed(**parts: Any) -> Tokenizer:
    backend = byte_level()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


UNBOUNDED = {
    "a step that removes": changed(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.ByteLevel()]
        )
    ),
    "stripping": changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "runs become one": changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "a text that vanishes": changed(normalizer=normalizers.Replace(" ", "")),
    "continuation bytes without a token": byte_level(without=tuple(range(0x80, 0xC0))),
    "unknown characters in one": byte_fallback(without=(0x62,)),
    "another model": Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_characters_may_vanish_nothing_is_refused(name: str) -> None:
    assert reach(UNBOUNDED[name]).least_tokens("b " * 10**6) == 0


def test_no_composition_is_of_more_code_points_than_reckoned_with() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(point))) for point in range(0x110000))
    assert longest == len(WIDE) == 4


@pytest.mark.parametrize("kind", ["byte_level_folder", "sentencepiece_folder"])
def test_h02_the_tokenizers_of_supported_models_have_a_bound(
    kind: str, request: pytest.FixtureRequest
) -> None:
    backend = Tokenizer.from_file(str(Path(request.getfixturevalue(kind)) / "tokenizer.json"))
    assert reach(backend).least_tokens("word " * 10_000) >= 1000
