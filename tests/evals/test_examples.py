"""The worst come first, few of one task, with what both models said."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from qinfer.evals.answers import Pair
from qinfer.evals.examples import MOST, kl_quantiles, moved, regressions
from qinfer.evals.fidelity import WindowScores
from qinfer.evals.items import Item, Kind


def item(
    item_id: int,
    answer: str,
    *,
    task: str = "t",
    logliks: tuple[float, ...] = (),
    kind: Kind = "choice",
    prompt: str = "Q",
) -> Item:
    choices = ("yes", "no", "maybe")[: len(logliks)]
    return Item(
        task=task,
        item_id=item_id,
        kind=kind,
        doc_digest="",
        prompt=prompt,
        choices=choices,
        logliks=logliks,
        target="yes",
        answer=answer,
        metric="acc",
        correct=answer == "yes",
        scores={},
    )


def lost(item_id: int, before: float, after: float, task: str = "t") -> Pair:
    """The right choice led by `before` nats and is `after` nats behind."""
    ours = item(item_id, "yes", task=task, logliks=(0.0, -before, -50.0))
    return ours, item(item_id, "no", task=task, logliks=(-after, 0.0, -50.0))


def test_what_fell_furthest_comes_first_and_only_what_was_lost_comes() -> None:
    kept = item(9, "yes", logliks=(0.0, -1.0)), item(9, "yes", logliks=(0.0, -9.0))
    won = item(8, "no", logliks=(-1.0, 0.0)), item(8, "yes", logliks=(0.0, -1.0))
    found = regressions([lost(1, 0.5, 0.5), kept, won, lost(2, 3.0, 2.0), lost(3, 0.1, 4.0)])
    assert [one["question"] for one in found] == [2, 3, 1]
    assert found[0]["source"] == "yes"
    assert found[0]["candidate"] == "no"
    assert found[0]["choices"][0] == {"text": "yes", "source": 0.0, "candidate": -2.0}
    assert found[0]["prompt_of_candidate"] is None


def test_one_task_does_not_fill_the_list() -> None:
    pairs = [lost(i, 10.0, 10.0, task="big") for i in range(50)]
    pairs += [lost(i, 0.1, 0.1, task=f"small {i}") for i in range(50)]
    found = regressions(pairs)
    assert len(found) == MOST
    assert sum(one["task"] == "big" for one in found) == 4
    assert found[0]["task"] == "big"


def test_prompts_that_differ_are_both_shown_and_long_ones_from_their_end() -> None:
    ours = item(1, "yes", kind="generation", prompt="x" * 5000 + "end")
    theirs = item(1, "nope", kind="generation", prompt="broken template")
    (found,) = regressions([(ours, theirs)])
    assert found["prompt"].endswith("xend")
    assert len(found["prompt"]) == 2000
    assert found["prompt_of_candidate"] == "broken template"
    assert found["choices"] == []


def scores(kl: Sequence[float]) -> WindowScores:
    ids, probabilities = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0.5, 0.25], [0.75, 0.125]])
    values = torch.tensor(kl)
    return WindowScores(values, torch.ones(len(kl)), values[1:], values[1:], ids, probabilities)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in token_ids)


def test_the_text_is_shown_up_to_the_position_that_moved_most() -> None:
    windows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    first, second = moved(windows, [scores([0.1, 0.2, 0.3, 0.1]), scores([0.0, 0.0, 0.0, 2.0])], decode)
    assert (first["window"], first["position"], first["kl"]) == (1, 3, 2.0)
    assert (first["context"], first["next"]) == ("efgh", None)
    assert (second["window"], second["position"]) == (0, 2)
    assert (second["context"], second["next"]) == ("abc", "d")
    assert second["source"] == [{"token": "b", "probability": 0.5}, {"token": "c", "probability": 0.25}]
    assert second["candidate"][0] == {"token": "d", "probability": 0.75}


def test_what_is_no_number_moved_most() -> None:
    found = moved([[0, 1], [2, 3]], [scores([5.0, 1.0]), scores([0.1, math.nan])], decode)
    assert [(one["window"], one["kl"]) for one in found] == [(1, None), (0, 5.0)]
    assert kl_quantiles([scores([0.1, math.nan])]) == []


def test_quantiles_are_order_statistics() -> None:
    found = dict(kl_quantiles([scores([3.0, 1.0]), scores([2.0, 0.0, 4.0])]))
    assert len(found) == 101
    assert [found[share] for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([0, 1, 2, 3, 4])
