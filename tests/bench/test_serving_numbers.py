"""Numbers of a load, from samples whose times are given: vLLM's definitions, worked out by hand."""

import pytest

from qinfer.bench.sample import Sample
from qinfer.bench.serving_numbers import numbers, steady_state

#         prompt due  sent  arrivals             tokens
FIRST = Sample(10, 0.0, 0.0, [0.5, 0.7, 1.0, 1.1], 4)
SECOND = Sample(20, 0.0, 1.0, [1.2, 2.2], 5)  # its chunks bring 2.5 tokens each
SHORT = Sample(5, 0.5, 0.6, [0.9], 1)
FAILED = Sample(7, 0.0, 0.1, [0.2], 0, error="HTTP 503: full")
SLO = {"ttft": 400.0, "tpot": 210.0, "e2el": 1300.0}


@pytest.fixture
def document():
    return numbers([FIRST, SECOND, SHORT, FAILED], 4.0, [50.0, 99.0], SLO)


def test_counts_and_rates_are_of_complete_requests(document):
    assert (document["completed"], document["failed"]) == (3, 1)
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (35, 10)
    assert document["request_throughput"] == 3 / 4
    assert document["output_throughput"] == 10 / 4
    assert document["total_token_throughput"] == 45 / 4
    assert document["errors_by_type"] == {"HTTP 503": 1}


def test_latencies_count_from_sending(document):
    assert document["mean_ttft_ms"] == pytest.approx(1e3 * (0.5 + 0.2 + 0.3) / 3)
    assert document["median_ttft_ms"] == document["p50_ttft_ms"] == pytest.approx(300)
    assert document["mean_e2el_ms"] == pytest.approx(1e3 * (1.1 + 1.2 + 0.3) / 3)
    assert document["p99_e2el_ms"] == pytest.approx(1200 - 0.02 * 100)


def test_time_per_token_leaves_out_answers_of_one(document):
    assert document["mean_tpot_ms"] == pytest.approx(1e3 * (0.6 / 3 + 1.0 / 4) / 2)


def test_gaps_are_those_between_arrivals(document):
    assert document["mean_itl_ms"] == pytest.approx(1e3 * (0.2 + 0.3 + 0.1 + 1.0) / 4)
    spread = [g - 0.4 for g in (0.2, 0.3, 0.1, 1.0)]
    assert document["std_itl_ms"] == pytest.approx(1e3 * (sum(d * d for d in spread) / 4) ** 0.5)


def test_waiting_on_the_client_is_told_apart(document):
    assert document["mean_client_queue_time_ms"] == pytest.approx(1e3 * (0 + 1.0 + 0.1) / 3)
    assert document["mean_e2el_including_client_queue_ms"] == pytest.approx(1e3 * (1.1 + 2.2 + 0.4) / 3)


def test_attainment_is_over_requests_sent(document):
    assert document["slo_attainment_by_metric"] == {"ttft": 2 / 4, "tpot": 2 / 4, "e2el": 3 / 4}
    assert document["slo_attainment"] == 1 / 4  # the short one alone: a token after none takes no time
    assert document["request_goodput"] == 1 / 4
    without = numbers([FIRST], 4.0, [99.0], {})
    assert without["request_goodput"] is without["slo_attainment"] is None


def test_peaks_are_of_whole_seconds(document):
    # second 0: 0.5, 0.7, 0.9; second 1: 1.0, 1.1 and half of SECOND's five
    assert document["max_output_tokens_per_s"] == pytest.approx(4.5)
    assert document["max_concurrent_requests"] == 2


def test_nothing_complete():
    document = numbers([FAILED], 1.0, [99.0], SLO)
    assert document["completed"] == document["output_throughput"] == document["mean_ttft_ms"] == 0
    assert document["steady_state"] is None


def test_the_steady_state_leaves_out_ramp_and_tail():
    samples = [Sample(1, sent=float(i), arrivals=[20.0 + i / 10], output_len=10) for i in range(10)]
    lone = Sample(1, sent=20.9, arrivals=[30.0, 40.0], output_len=2)
    found = steady_state([*samples, lone])
    # ten run from 9 to 20; eight are enough, which run from 7 to 20.2; the slices are 0.4 seconds long
    start, end = found["start"], found["end"]
    assert start == pytest.approx(7.0, abs=0.81)
    assert end == pytest.approx(20.2, abs=0.81)
    ended = [i for i in range(10) if 20 + i / 10 <= end]
    assert found["output_throughput"] == pytest.approx(10 * len(ended) / (end - start))
    busy = sum(min(end, 20 + i / 10) - max(start, i) for i in range(10)) + max(0.0, end - 20.9)
    assert found["avg_concurrency"] == pytest.approx(busy / (end - start))


def test_waves_that_end_together_are_one_steady_state():
    waves = [Sample(1, sent=t + 0.01, arrivals=[t + 0.99], output_len=5) for t in range(6) for _ in range(4)]
    found = steady_state(waves)
    assert (found["start"], found["end"]) == pytest.approx((0.01, 5.99))
    assert found["avg_concurrency"] == pytest.approx(4 * 6 * 0.98 / 5.98)
    assert found["output_throughput"] == pytest.approx(4 * 6 * 5 / 5.98)
