"""Intervals over clusters cover, are deterministic, and take NaN or too little data for no evidence."""

from __future__ import annotations

import math

import pytest
import torch

from qinfer.evals.statistics import (
    Interval,
    exponential,
    mean_interval,
    quantile_interval,
    student_quantile,
)


def test_mean_is_over_values_not_over_clusters() -> None:
    interval = mean_interval([torch.full((512,), 2.0), torch.full((64,), 3.0)])
    assert interval.value == pytest.approx(1216 / 576, abs=1e-12)
    assert 2.0 <= interval.low <= interval.value <= interval.high <= 3.0


def test_constant_values_have_an_interval_without_width() -> None:
    clusters = [torch.full((n,), 0.25) for n in (3, 5, 8, 1)]
    assert mean_interval(clusters) == (0.25, 0.25, 0.25)
    assert quantile_interval(clusters, 0.99) == (0.25, 0.25, 0.25)


def test_equal_seeds_give_equal_intervals_and_others_do_not() -> None:
    clusters = list(torch.rand(12, 40, generator=torch.Generator().manual_seed(1)))
    assert mean_interval(clusters, seed=7) == mean_interval(clusters, seed=7)
    assert mean_interval(clusters, seed=7) != mean_interval(clusters, seed=8)
    assert quantile_interval(clusters, 0.9, seed=7) == quantile_interval(clusters, 0.9, seed=7)


def test_more_confidence_takes_a_wider_interval() -> None:
    clusters = list(torch.rand(12, 40, generator=torch.Generator().manual_seed(1)))
    for make in (
        mean_interval,
        lambda values, confidence: quantile_interval(values, 0.9, confidence=confidence),
    ):
        sure, surer = make(clusters, confidence=0.9), make(clusters, confidence=0.99)
        assert surer.low < sure.low < sure.value == surer.value < sure.high < surer.high


@pytest.mark.parametrize("num_clusters", [8, 16])
def test_the_interval_covers_the_true_mean_as_often_as_it_says(num_clusters: int) -> None:
    """Skewed values that share variance within a cluster, as KL does; the true mean is known."""
    generator = torch.Generator().manual_seed(0)
    missed_low = missed_high = 0
    trials = 200
    for trial in range(trials):
        shared = torch.randn(num_clusters, 1, generator=generator)
        own = torch.randn(num_clusters, 20, generator=generator)
        values = torch.exp(0.4 * shared + 0.3 * own)
        interval = mean_interval(list(values), seed=trial)
        true_mean = math.exp((0.4**2 + 0.3**2) / 2)
        missed_low += interval.high < true_mean
        missed_high += interval.low > true_mean
    assert 0.86 <= 1 - (missed_low + missed_high) / trials <= 0.97
    assert missed_low / trials <= 0.12  # skew makes the upper bound the weaker one


def test_ignoring_clusters_would_be_too_sure() -> None:
    shared = torch.randn(16, 1, generator=torch.Generator().manual_seed(3)).expand(16, 50)
    clustered = mean_interval(list(shared))
    independent = mean_interval(list(shared.reshape(800, 1)))
    assert clustered.high - clustered.low > 5 * (independent.high - independent.low)


def test_quantile_equals_the_order_statistic_and_is_covered() -> None:
    values = torch.arange(1000.0)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    interval = quantile_interval(list(values.split(50)), 0.99)
    assert interval.value == 989.0  # the smallest value that 99 % do not exceed
    assert interval.low < 989.0 < interval.high


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_e10_a_bad_value_makes_the_whole_estimate_bad(bad: float) -> None:
    clusters = [torch.ones(4) for _ in range(9)]
    clusters[3] = torch.tensor([1.0, bad, 1.0, 1.0])
    assert not math.isfinite(mean_interval(clusters).value)
    assert math.isnan(quantile_interval(clusters, 0.5).value)


def test_no_cluster_is_nan_and_one_is_unbounded() -> None:
    assert math.isnan(mean_interval([]).value)
    assert math.isnan(quantile_interval([], 0.5).value)
    assert mean_interval([torch.ones(5)]) == (1.0, -math.inf, math.inf)
    assert quantile_interval([torch.ones(5)], 0.5) == (1.0, -math.inf, math.inf)


@pytest.mark.parametrize(("degrees", "value"), [(3, 2.3534), (7, 1.8946), (31, 1.6955), (1000, 1.6464)])
def test_student_quantile_against_published_tables(degrees: int, value: float) -> None:
    assert student_quantile(0.95, degrees) == pytest.approx(value, rel=0.01)


def test_exponential_of_anything() -> None:
    assert Interval(0.0, -math.inf, 1e9).map(exponential) == (1.0, 0.0, math.inf)
    assert math.isnan(exponential(math.nan))
