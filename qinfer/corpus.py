"""English text that every machine has: the language reference inside Python's own `pydoc_data.topics`.

Calibration and evaluation both need text, and neither may see the other's. The topics overlap one another
(the text of "with" stands again inside "compound"), so a split by topic would leak. The unit here is the
section: a title and the prose below it, up to the next title, whichever topic it was found in. The sha256
of the title decides which side a section falls on, so the split is the same on every machine and survives
new Python versions; a paragraph that stands in several sections is kept once, on the calibration side if it
occurs there. Code, grammar and tables are dropped, hard-wrapped lines are joined.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pydoc_data.topics import topics
from typing import Literal

Split = Literal["calibration", "evaluation"]

_UNDERLINE = re.compile(r"^([*=\-~\"'^])\1{2,}$")
_PROSE = re.compile(r"^[A-Z“\"(*\d].*[.:;?!)”\"]$")
_NOT_PROSE = re.compile(r"::=|>>>|\S   +\S|\|$|^\s*\+-", re.MULTILINE)
_MIN_WORDS = 8  # per paragraph; shorter ones are signatures and labels
_MIN_CHARS = 200  # per document


def reference_text(split: Split) -> list[str]:
    """Documents of one side of the split, in a fixed order: a title line, then paragraphs of prose.

    The two sides share no section title and no paragraph. Raises ValueError for an unknown split.
    """
    if split not in ("calibration", "evaluation"):
        raise ValueError(f"split must be 'calibration' or 'evaluation', got {split!r}")
    return list(_documents()[split])


def split_of(title: str) -> Split:
    """The side that a section falls on: the first byte of the sha256 of its title, in lower case."""
    return "evaluation" if sha256(title.casefold().encode()).digest()[0] < 128 else "calibration"


@cache
def _documents() -> dict[Split, tuple[str, ...]]:
    sections: dict[str, list[str]] = {}
    for name in sorted(topics):
        for title, paragraphs in _sections(topics[name]):
            sections.setdefault(title, []).extend(paragraphs)
    seen: set[str] = set()
    result: dict[Split, tuple[str, ...]] = {}
    order: tuple[Split, ...] = ("calibration", "evaluation")
    for split in order:  # in this order: a shared paragraph stays in the first
        documents = []
        for title in sorted(sections):
            if split_of(title) != split:
                continue
            fresh = [p for p in dict.fromkeys(sections[title]) if p not in seen]
            seen.update(fresh)
            text = "\n\n".join([title, *fresh])
            if len(text) >= _MIN_CHARS:
                documents.append(text)
        result[split] = tuple(documents)
    return result


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """Titles (lines underlined with one repeated sign) with the prose paragraphs below each."""
    lines = text.splitlines()
    starts = [i for i in range(len(lines) - 1) if lines[i].strip() and _UNDERLINE.match(lines[i + 1].strip())]
    ends = [*starts[1:], len(lines)]
    return [(lines[a].strip(), _paragraphs(lines[a + 2 : b])) for a, b in zip(starts, ends, strict=True)]


def _paragraphs(lines: list[str]) -> list[str]:
    blocks = (block.strip() for block in re.split(r"\n\s*\n", "\n".join(lines)))
    prose = (_join(block) for block in blocks if not _NOT_PROSE.search(block))
    return [p for p in prose if len(p.split()) >= _MIN_WORDS and _PROSE.match(p)]


def _join(block: str) -> str:
    """One line of hard-wrapped text; a word broken after its own hyphen is put together again."""
    return " ".join(re.sub(r"(?<=\w-)\n\s*", "", block).split())
