"""KL, agreement and likelihoods against float64, whatever the slicing; NaN is seen wherever it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from qinfer.evals.fidelity import Logits, compare, measures, noise_floor
from qinfer.evals.gate import Verdict, decide
from qinfer.evals.thresholds import LIMITS

VOCAB = 97


def table(seed: int, noise: float = 0.0) -> Tensor:
    base = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    return base + noise * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def model(logits_of: Tensor, rows: int = 256) -> Logits:
    """A model whose logits depend on the last token alone."""

    def logits(token_ids: Sequence[int]) -> Iterator[Tensor]:
        yield from logits_of[torch.tensor(token_ids)].split(rows)

    return logits


def windows(count: int = 10, length: int = 70) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (count, length), generator=generator).tolist()


def test_scores_equal_float64() -> None:
    ours, theirs = table(1), table(2, 0.3)
    for token_ids, scores in zip(windows(), compare(model(ours), model(theirs), windows()), strict=True):
        p, q = (t.double()[torch.tensor(token_ids)].log_softmax(-1) for t in (ours, theirs))
        torch.testing.assert_close(scores.kl.double(), (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=1e-5)
        assert scores.agrees.tolist() == (p.argmax(-1) == q.argmax(-1)).float().tolist()
        targets = torch.tensor(token_ids[1:])[:, None]
        for nll, log_probs in ((scores.reference_nll, p), (scores.nll, q)):
            assert nll.shape == (69,)
            torch.testing.assert_close(
                nll.double(), -log_probs[:-1].gather(1, targets)[:, 0], atol=1e-5, rtol=1e-5
            )


def test_the_position_that_moved_most_keeps_what_both_models_would_say() -> None:
    ours, theirs = table(1), table(2, 0.3)
    (window,) = windows(1)
    (scores,) = compare(model(ours, 7), model(theirs, 64), [window])
    last = window[int(scores.kl.argmax())]
    for row, logits in enumerate((ours[last], theirs[last])):
        wanted = logits.softmax(-1).topk(5)
        assert scores.top_ids[row].tolist() == wanted.indices.tolist()
        torch.testing.assert_close(scores.top_probabilities[row], wanted.values)


def test_rms_change_of_the_true_token_and_nll_difference_against_their_definitions() -> None:
    scores = list(compare(model(table(1)), model(table(2, 0.3)), windows()))
    found = {measure.name: measure.interval.value for measure in measures(scores, LIMITS["w16"][0])}
    before = torch.cat([window.reference_nll for window in scores]).double()
    after = torch.cat([window.nll for window in scores]).double()
    moved = ((-after).exp() - (-before).exp()).square().mean().sqrt()
    assert found["RMS change of the true token's probability"] == pytest.approx(float(moved), rel=1e-6)
    assert found["NLL difference"] == pytest.approx(float((after - before).mean()), abs=1e-9)
    assert math.exp(found["NLL difference"]) == pytest.approx(found["perplexity ratio"], rel=1e-12)


@pytest.mark.parametrize(("first", "second"), [(1, 256), (7, 32), (33, 31), (64, 70)])
def test_slicing_changes_nothing(first: int, second: int) -> None:
    whole = list(compare(model(table(1)), model(table(2, 0.3)), windows()))
    sliced = list(compare(model(table(1), first), model(table(2, 0.3), second), windows()))
    for a, b in zip(whole, sliced, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_the_same_model_is_at_zero_exactly() -> None:
    scores = list(compare(model(table(1)), model(table(1), 13), windows()))
    found = {measure.name: measure.interval for measure in measures(scores, LIMITS["w16"][0])}
    assert found["mean KL"] == (0.0, 0.0, 0.0)
    assert found["p99 KL"] == (0.0, 0.0, 0.0)
    assert found["top-1 agreement"] == (1.0, 1.0, 1.0)
    assert found["perplexity ratio"] == (1.0, 1.0, 1.0)


def test_logits_moved_by_a_constant_are_the_same_distribution() -> None:
    scores = list(compare(model(table(1)), model(table(1) + 5), windows()))
    assert max(float(window.kl.max()) for window in scores) < 1e-5


def test_perplexity_ratio_is_the_ratio_of_the_perplexities() -> None:
    scores = list(compare(model(table(1)), model(table(2, 0.5)), windows()))
    found = {measure.name: measure.interval for measure in measures(scores, LIMITS["w16"][0])}
    ratio = found["perplexity of the candidate"].value / found["perplexity of the source"].value
    assert found["perplexity ratio"].value == pytest.approx(ratio, rel=1e-9)
    assert found["perplexity ratio"].low < ratio < found["perplexity ratio"].high


@pytest.mark.parametrize("broken", ["candidate", "reference", "both"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_e10_one_bad_logit_fails(broken: str, value: float) -> None:
    good, bad = table(1), table(1)
    token_ids = windows()
    bad[token_ids[3][20], 11] = value
    ours = bad if broken != "candidate" else good
    theirs = bad if broken != "reference" else good
    scores = list(compare(model(ours), model(theirs), token_ids))
    found = measures(scores, LIMITS["w4a16"][0])
    verdict, reasons = decide(found, num_tokens=700, num_windows=10, wanted=700)
    assert verdict is Verdict.FAIL
    assert reasons[0].startswith("positions without a number")


def test_e10_zero_samples() -> None:
    found = measures([], LIMITS["w4a16"][0])
    assert decide(found, num_tokens=0, num_windows=0, wanted=100)[0] is not Verdict.PASS
    assert decide(found, num_tokens=100, num_windows=10, wanted=100)[0] is Verdict.FAIL


def test_a_model_that_drops_a_position_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="against"):
        list(compare(model(table(1)), lambda token_ids: model(table(1))(token_ids[:-1]), [[1, 2, 3]]))

    def short(token_ids: Sequence[int]) -> Iterator[Tensor]:
        return model(table(1))(token_ids[:-1])

    with pytest.raises(AssertionError, match="logits of 2 positions for 3 tokens"):
        list(compare(short, short, [[1, 2, 3]]))


def test_the_noise_floor_is_reported_only() -> None:
    floor = noise_floor(list(compare(model(table(1)), model(table(1).bfloat16().float()), windows())))
    assert [measure.verdict for measure in floor] == [None, None]
    assert 0 < floor[0].interval.value < 1e-3
