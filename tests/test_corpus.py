"""The reference text: readable, ample, and split so that the two sides never meet."""

import pytest

from qinfer.corpus import reference_text, split_of


def _paragraphs(split):
    return {p for document in reference_text(split) for p in document.split("\n\n")[1:]}


def test_calibration_and_evaluation_share_no_title_and_no_paragraph():
    titles = [
        {d.split("\n\n")[0].casefold() for d in reference_text(s)} for s in ("calibration", "evaluation")
    ]
    assert not titles[0] & titles[1]
    assert not _paragraphs("calibration") & _paragraphs("evaluation")


def test_split_is_a_fixed_rule_of_the_title():
    known = {
        "Slicings": "evaluation",
        "Lists": "evaluation",
        "Calls": "calibration",
        "Lambdas": "calibration",
    }
    assert {title: split_of(title) for title in known} == known
    assert {title: split_of(title.upper()) for title in known} == known


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
def test_documents_are_prose_and_ample(split):
    documents = reference_text(split)
    assert documents == reference_text(split)
    text = "\n\n".join(documents)
    assert len(text) > 80_000  # about 20,000 tokens
    assert "::=" not in text
    assert ">>>" not in text
    letters = sum(c.isalpha() or c.isspace() for c in text)
    assert letters / len(text) > 0.88


def test_no_paragraph_is_repeated_within_a_split():
    for split in ("calibration", "evaluation"):
        paragraphs = [p for d in reference_text(split) for p in d.split("\n\n")[1:]]
        assert len(paragraphs) == len(set(paragraphs))


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'calibration' or 'evaluation'"):
        reference_text("test")
