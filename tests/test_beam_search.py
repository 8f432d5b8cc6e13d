"""The bookkeeping of a beam search, on log-probabilities written by hand."""

import math

import pytest

from qinfer.beam_search import MAX_LENGTH_PENALTY, Beam, BeamSearch
from qinfer.outputs import Logprob

END = 9


def entries(**probabilities: float) -> dict[int, Logprob]:
    """t1=0.5 -> token 1 with log 0.5."""
    return {int(name[1:]): Logprob(math.log(p)) for name, p in probabilities.items()}


def test_a_beam_that_ends_is_set_aside_and_compared_without_its_end() -> None:
    search = BeamSearch([7, 7], 2, 3, eos_ids=frozenset({END}))
    search.advance([entries(t1=0.6, t9=0.3, t2=0.1)])
    assert [beam.token_ids for beam in search.live] == [[7, 7, 1], [7, 7, 2]]
    search.advance([entries(t9=0.5, t3=0.4, t4=0.1), entries(t5=0.9, t6=0.1)])
    assert [beam.token_ids[2:] for beam in search.live] == [[1, 3], [2, 5]]
    search.advance([entries(t1=0.5, t2=0.5), entries(t1=1.0)])
    assert search.live == []
    best = search.best()
    scores = {
        (1, END): math.log(0.6 * 0.5) / 3,
        (END,): math.log(0.3) / 2,
        (1, 3, 1): math.log(0.6 * 0.4 * 0.5) / 5,
        (2, 5, 1): math.log(0.1 * 0.9) / 5,
    }
    expected = sorted(scores, key=lambda ids: -scores[ids])[:2]
    assert [tuple(beam.token_ids[2:]) for beam in best] == expected
    for beam in best:
        assert math.isclose(beam.score(1.0), scores[tuple(beam.token_ids[2:])])
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] == END else "length")
        told = [entry[token].logprob for entry, token in zip(beam.logprobs, beam.token_ids[2:], strict=True)]
        assert math.isclose(sum(told), beam.cum_logprob)


def test_a_search_is_over_when_every_beam_has_ended() -> None:
    search = BeamSearch([7], 2, 100, eos_ids=frozenset({END}), length_penalty=0.0)
    search.advance([entries(t9=1.0)])
    assert search.live == []
    assert [beam.token_ids for beam in search.best()] == [[7, END]]


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_beams_of_any_length_compare_at_any_penalty(penalty: float) -> None:
    better, worse = (Beam([7] * (1 << 22), cum_logprob=logprob) for logprob in (-1e6, -2e6))
    assert -math.inf < worse.score(penalty) < better.score(penalty) < 0
