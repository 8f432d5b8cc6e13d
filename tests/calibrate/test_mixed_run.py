"""Mixed precision as a whole: a budget is spent on the worst units, and a failing gate raises more."""

from dataclasses import replace

import pytest
import torch

from qinfer.calibrate import pipeline
from qinfer.calibrate.mixed_run import order_of, run_until, with_costs, within
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.errors import UserError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

TEXT = [f"Text {i} is read to see which layers matter, and it is read once." for i in range(6)]


@pytest.fixture
def job(tmp_path):
    source = tiny_model("smollm2", tmp_path / "source", dtype="bfloat16")
    job = prepare_job(
        open_checkpoint(source),
        Tokenizer.load(source),
        tmp_path / "out",
        Settings(scheme="w4a16", method="gptq", calibration=TEXT, max_seq_len=48),
        mixing=True,
    )
    return with_costs(replace(job, dtype=torch.float32), progress=False)


def test_a_budget_is_kept_in_the_file_and_told_in_the_report(job):
    mixed = within(job, 5.5)
    report = pipeline.run(mixed, progress=False)
    assert 4.4 < report.average_bits <= 5.5
    assert len(report.sensitivity) == 8
    assert all(cost > 0 for cost in report.sensitivity.values())
    assert 0 < len(report.mix) < 8
    worst = order_of(job)[0]
    assert report.mix[f"layer {worst[0]} {worst[1]}"] == "w8a16-int8"
    assert f"{report.average_bits:.2f} bits per weight" in report.to_text()
    again = type(report).from_dict(report.to_dict())
    assert again == report


def test_units_are_raised_until_it_passes(job, caplog):
    seen = []

    def passes(report):
        seen.append(len(report.mix))
        checkpoint = open_checkpoint(job.out)
        assert len({checkpoint.scheme(f"model.layers.{i}.mlp.down_proj").label for i in (0, 1)}) <= 2
        return len(seen) == 4

    report = run_until(job, passes, progress=False)
    assert seen == [0, 1, 2, 3]
    assert list(report.mix) == [f"layer {i} {group}" for i, group in order_of(job)[:3]]
    assert "raising 3 of 8 units" in caplog.text


def test_it_ends_where_nothing_is_left_or_the_budget_is_spent(job, caplog):
    report = run_until(job, lambda _: False, progress=False)
    assert len(report.mix) == 8
    assert "none is left" in caplog.text
    bounded = run_until(replace(job, overwrite=True), lambda _: False, budget=5.5, progress=False)
    assert bounded.average_bits <= 5.5
    assert "the next step would take" in caplog.text


def test_too_small_a_budget_is_refused(job):
    with pytest.raises(UserError, match="a budget of 3 bits per weight is not between"):
        within(job, 3)
