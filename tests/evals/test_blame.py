"""One part is to blame when it alone makes most of the damage and far more than any other."""

from __future__ import annotations

import json
import math

from qinfer.evals.blame import Blame, Part, suspects_of


def blame(total: float, **shares: float) -> Blame:
    return Blame(tuple(Part(name.replace("_", " "), 0.1, share) for name, share in shares.items()), total, 64)


def test_the_part_that_makes_most_of_it_is_to_blame() -> None:
    found = blame(2.0, layer_1=0.1, layer_7=1.8, head=0.0)
    assert found.culprit == Part("layer 7", 0.1, 1.8)
    assert found.line == (
        "layer 7 is to blame: alone in the source it makes a mean KL of 1.8 nats/token, of 2 in all; "
        "next layer 1 with 0.1"
    )


def test_damage_that_is_spread_is_nobodys() -> None:
    assert blame(2.0, layer_1=0.2, layer_7=0.25).culprit is None  # no part makes half of it
    assert blame(2.0, layer_1=1.2, layer_7=1.5).culprit is None  # neither stands out
    assert "no part alone is to blame" in blame(2.0, layer_1=1.2, layer_7=1.5).line


def test_a_part_that_gives_no_number_is_the_worst() -> None:
    assert suspects_of([0.1, math.nan, 0.5, 0.2, 0.01]) == [1, 2, 3]
    found = blame(math.nan, layer_1=3.0, layer_7=math.nan)
    assert found.suspects[0].name == "layer 7"
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["total_kl"] is None
    assert document["parts"][1] == {"name": "layer 7", "error": 0.1, "kl_alone": None}


def test_parts_that_were_not_tried_are_no_suspects() -> None:
    found = Blame((Part("layer 0", 0.3, 0.9), Part("layer 1", 0.2)), 1.0, 64)
    assert [part.name for part in found.suspects] == ["layer 0"]
    assert found.culprit is not None
    assert found.to_dict()["culprit"] == "layer 0"
