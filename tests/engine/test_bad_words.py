"""Spelling of forbidden words: once, on any thread, and only of those that an answer could contain."""

from __future__ import annotations

from qinfer.engine.bad_words import BadWords
from qinfer.sampling_params import SamplingParams


class Letters:
    """A tokenizer of one token per character that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.asked.append(text)
        return [ord(letter) for letter in text]

    def least_tokens(self, text: str) -> int:
        return len(text) // 2


def test_a_word_is_spelled_at_the_start_and_after_a_space():
    words = BadWords(Letters(), 100)
    assert words.of(SamplingParams(bad_words=["ab", " c"])) == ((97, 98), (32, 97, 98), (32, 99))
    assert words.of(SamplingParams()) == ()
    assert BadWords(None, 100).of(SamplingParams(bad_words=["ab"])) == ()


def test_what_no_answer_can_hold_is_not_spelled():
    letters = Letters()
    words = BadWords(letters, 100)
    found = words.of(SamplingParams(bad_words=["a" * 10, "abc", "abcd"], max_tokens=4))
    assert found == ((97, 98, 99), (32, 97, 98, 99), (97, 98, 99, 100))
    assert letters.asked == ["abc", " abc", "abcd", " abcd"]  # ten letters are five tokens at least
    letters.asked.clear()
    assert words.of(SamplingParams(bad_words=["a" * 300], max_tokens=None)) == ()
    assert letters.asked == []


def test_the_same_words_are_spelled_once():
    letters = Letters()
    words = BadWords(letters, 100)
    first = words.of(SamplingParams(bad_words=["ab"], max_tokens=50))
    assert words.of(SamplingParams(bad_words=["ab"], max_tokens=50)) is first
    assert letters.asked == ["ab", " ab"]
    assert words.of(SamplingParams(bad_words=["ab"], max_tokens=1)) == ()
