"""Driving an engine: what is counted, and that static batches really wait for their longest answer."""

import numpy as np
import pytest
import torch

from qinfer.bench.dataset import BenchRequest
from qinfer.bench.machine import bandwidth, product_rate
from qinfer.bench.report import percentile
from qinfer.bench.roofline import Work
from qinfer.bench.run import Driver
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError
from qinfer.model.decoder import load_decoder
from qinfer.quant import ActivationFormat
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_decoder(open_checkpoint(tiny_model("llama3", tmp_path_factory.mktemp("run") / "model")))


@pytest.fixture
def engine(decoder):
    return Engine(decoder, None, EngineOptions(max_num_seqs=4, num_kv_blocks=256, max_num_batched_tokens=256))


def asked(*lengths, prompt_len=3):
    return [
        BenchRequest([(7 * i + j) % 300 for j in range(prompt_len)], length)
        for i, length in enumerate(lengths)
    ]


def test_tokens_are_those_that_were_asked_for(engine):
    requests = asked(1, 5, 2, 9, 3, 3)
    measured = Driver(engine).run(requests)
    assert sorted(item.output_len for item in measured.work) == [1, 2, 3, 3, 5, 9]
    assert (measured.prompt_tokens, measured.output_tokens) == (18, 23)
    assert max(measured.occupancy) <= 4
    assert len(measured.steps) == len(measured.occupancy)
    assert 0 < sum(measured.steps) <= measured.elapsed
    assert all(0 < seconds <= measured.elapsed for seconds in measured.first_tokens)


def test_continuous_fills_a_place_at_once(engine):
    measured = Driver(engine).run(asked(20, 1, 1, 1, 19, 19, 19))
    # three rows are free after one step, so both groups run side by side
    assert len([running for running in measured.occupancy if running]) <= 22


def test_static_waits_for_the_longest_of_each_batch(engine):
    before = engine.stats().generation_tokens
    measured = Driver(engine).run(asked(20, 1, 1, 1, 19, 19, 19), "static")
    assert len([running for running in measured.occupancy if running]) >= 20 + 19 - 2
    assert measured.output_tokens == 20 + 3 + 3 * 19  # what was asked for
    assert engine.stats().generation_tokens - before == 4 * 20 + 3 * 19  # what was computed
    assert sorted(item.output_len for item in measured.work) == [1, 1, 1, 19, 19, 19, 20]


def test_several_answers_share_a_static_batch(engine):
    measured = Driver(engine, n=2).run(asked(4, 4, 4), "static")
    assert measured.output_tokens == 24
    assert max(measured.occupancy) <= 4


def test_the_prefix_cache_is_seen(engine):
    requests = asked(2, prompt_len=100)
    Driver(engine).run(requests)
    measured = Driver(engine).run(requests)
    assert measured.prefix_queries >= 99
    assert measured.prefix_hits == 96  # whole pages of 16
    assert measured.work == [Work(100, 2, 1, 96)]
    engine.reset_prefix_cache()
    assert Driver(engine).run(requests).prefix_hits == 0


def test_what_never_fits_is_refused(engine):
    with pytest.raises(UserError):
        Driver(engine).run(asked(3, prompt_len=5000))


def test_percentiles_interpolate_as_numpy_does():
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    for p in (0, 10, 25, 50, 90, 99, 100):
        assert percentile(values, p) == pytest.approx(np.percentile(values, p))


def test_a_machine_has_rates():
    cpu = torch.device("cpu")
    assert 1e8 < bandwidth(cpu) < 1e13
    rates = [product_rate(cpu, torch.float32, one) for one in ActivationFormat]
    assert all(1e9 < rate < 1e16 for rate in rates)
