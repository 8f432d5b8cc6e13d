"""Questions that are made by rule: arithmetic, copying, retrieval in context, counting, reciting.

They measure what a small model can do at all; what a large one knows they do not. A question is made from its
task's name and its number alone, by a generator whose draws are the same in every version of Python. Examples
stand before questions that a small model would not understand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")

_LISTS = """
apple bridge candle desert engine flower garden hammer island jacket kettle ladder mirror needle orange pencil
rabbit saddle tunnel valley window yellow anchor basket castle dragon feather glacier harbor lantern marble
novel ocean pepper quarter river silver temple velvet winter
;Anna Bruno Clara David Emma Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga Peter
;apples books coins stamps marbles pencils shells cards
"""
_WORDS, _NAMES, _THINGS = (tuple(part.split()) for part in _LISTS.split(";"))


class Draw:
    """Choices that are the same everywhere: of a generator only `random()` is promised to stay."""

    def __init__(self, name: str, index: int) -> None:
        self._random = random.Random(f"{name} {index}").random

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def some(self, items: Sequence[_T], count: int) -> list[_T]:
        """`count` different ones, in random order."""
        ranked = sorted((self._random(), i) for i in range(len(items)))
        return [items[i] for _, i in ranked[:count]]


class Question(NamedTuple):
    """A prompt with its right answer; `wrong` choices where there are any, else it is answered freely."""

    prompt: str
    answer: str
    wrong: tuple[str, ...] = ()


def arithmetic(draw: Draw) -> Question:
    """A sum or a difference of numbers up to 40, after four examples."""
    a, b = draw.number(2, 40), draw.number(2, 40)
    a, b, sign = (max(a, b), min(a, b), "-") if draw.number(0, 1) else (a, b, "+")
    right = a - b if sign == "-" else a + b
    near = [n for n in (right + 1, right - 1, right + 2, right + 10, right - 10) if n >= 0]
    shots = "3 + 4 = 7\n9 - 2 = 7\n12 + 15 = 27\n30 - 11 = 19\n"
    wrong = tuple(f" {n}" for n in draw.some(near, 3))
    return Question(f"{shots}{a} {sign} {b} =", f" {right}", wrong)


def copying(draw: Draw) -> Question:
    """The next word of a list of twelve that is being repeated."""
    words = draw.some(_WORDS, 12)
    done = draw.number(1, 10)
    others = [word for i, word in enumerate(words) if i != done]
    prompt = f"The list: {', '.join(words)}.\nThe same list again: {', '.join(words[:done])},"
    return Question(prompt, f" {words[done]}", tuple(f" {word}" for word in draw.some(others, 3)))


def retrieval(draw: Draw) -> Question:
    """One of twelve numbers that the context gives to twelve names."""
    names = draw.some(_NAMES, 12)
    codes = draw.some(range(100, 1000), 12)
    asked = draw.number(0, 11)
    facts = " ".join(
        f"The number of {name}'s room is {code}." for name, code in zip(names, codes, strict=True)
    )
    wrong = draw.some([code for i, code in enumerate(codes) if i != asked], 3)
    prompt = f"{facts}\nQuestion: What is the number of {names[asked]}'s room?\nAnswer:"
    return Question(prompt, f" {codes[asked]}", tuple(f" {code}" for code in wrong))


_PROBLEM = "Question: {name} has {a} {thing} and {what} {b}. How many {thing} does {name} have now?\nAnswer:"


def problem(draw: Draw) -> Question:
    """Something gained or lost, worked out in words after four examples."""
    (name,), (thing,) = draw.some(_NAMES, 1), draw.some(_THINGS, 1)
    (what,) = draw.some(("buys", "finds", "loses", "sells"), 1)
    a, b = draw.number(9, 30), draw.number(2, 9)
    shots = ""
    for one, two, happens in ((7, 5, "buys"), (9, 4, "loses"), (12, 6, "finds"), (15, 3, "sells")):
        shown = _PROBLEM.format(name="Tom", a=one, thing="books", what=happens, b=two)
        shots += f"{shown} {_worked(one, two, happens)}\n\n"
    asked = _PROBLEM.format(name=name, a=a, thing=thing, what=what, b=b)
    return Question(shots + asked, f" {_worked(a, b, what)}")


def _worked(a: int, b: int, what: str) -> str:
    gains = what in ("buys", "finds")
    result = a + b if gains else a - b
    return f"{a} {'+' if gains else '-'} {b} = {result}. The answer is {result}."


def counting(draw: Draw) -> Question:
    """The next sixty of a row of numbers, by ones or twos."""
    first, step = draw.number(1, 60), draw.number(1, 2)
    numbers = [first + step * i for i in range(64)]
    by = "" if step == 1 else " by twos"
    prompt = f"Counting{by} from {numbers[0]} to {numbers[-1]}: {', '.join(map(str, numbers[:4]))},"
    return Question(prompt, f" {', '.join(map(str, numbers[4:]))}")


def recital(draw: Draw) -> Question:
    """A list of thirty-two words, repeated to its end."""
    words = draw.some(_WORDS, 32)
    prompt = f"The list: {', '.join(words)}.\nThe same list again: {words[0]},"
    return Question(prompt, f" {', '.join(words[1:])}")
