"""The report's pages: whole, without anything from elsewhere, and saying what the run did."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from qinfer.calibrate import pipeline
from qinfer.calibrate.mixed_run import with_costs, within
from qinfer.calibrate.prepare import prepare_job
from qinfer.calibrate.report import QuantizeReport
from qinfer.calibrate.report_page import html, markdown
from qinfer.calibrate.settings import Settings
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

TEXT = [f"Text {i} is read to see which layers matter, and it is read once." for i in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("report")
    source = tiny_model("smollm2", tmp / "source", dtype="bfloat16")
    job = prepare_job(
        open_checkpoint(source),
        Tokenizer.load(source),
        tmp / "out",
        Settings(scheme="w4a16", method="awq+gptq", calibration=TEXT, max_seq_len=48),
        mixing=True,
    )
    job = with_costs(replace(job, dtype=torch.float32), progress=False)
    pipeline.run(within(job, 5.5), progress=False)
    return tmp / "out"


def _report(folder):
    import json

    return QuantizeReport.from_dict(json.loads((folder / "qinfer_report.json").read_text()))


class _Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in ("meta", "line", "polyline", "br", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(folder):
    page = (folder / "qinfer_report.html").read_text()
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    tags = [tag for tag, _ in checker.seen]
    assert tags.count("svg") == 3
    assert tags.count("tr") > 2 * 4
    assert not [1 for _, attributes in checker.seen if "src" in attributes or "href" in attributes]
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "url(" not in page


def test_numbers_are_those_of_the_run(folder):
    report, page = _report(folder), (folder / "qinfer_report.html").read_text()
    first = report.layers[0]
    for number in (first.output_errors["down"], first.input_absmax["qkv"], first.outliers["gate_up"]):
        assert f'<td class="n">{number:.4g}</td>' in page
    assert report.calibration["sha256"] in page
    assert f"{report.average_bits:.2f} bits per weight" in page
    raised = next(iter(report.mix))
    assert f"{raised} to w8a16-int8" in page
    text = (folder / "qinfer_report.md").read_text()
    assert text.count("\n| ") == 1 + 2 * 4
    assert f"| {first.output_errors['down']:.4g} |" in text


def test_sizes_are_those_of_the_files(folder):
    report = _report(folder)
    for path, size in ((folder.parent / "source", report.bytes_before), (folder, report.bytes_after)):
        checkpoint = open_checkpoint(path)
        assert size == sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())


def test_clipped_weights_are_counted(folder):
    report = _report(folder)
    assert all(0 <= share < 0.5 for layer in report.layers for share in layer.clipped.values())
    assert any(share > 0 for layer in report.layers for share in layer.clipped.values())


def test_inputs_beyond_a_static_range_are_counted(tmp_path):
    source = tiny_model("llama", tmp_path / "source", dtype="bfloat16")
    job = prepare_job(
        open_checkpoint(source),
        Tokenizer.load(source),
        tmp_path / "out",
        Settings(scheme="w8a8-fp8-static", calibration=TEXT, max_seq_len=48),
    )
    report = pipeline.run(replace(job, dtype=torch.float32), progress=False)
    result = open_checkpoint(tmp_path / "out")
    for i, layer in enumerate(report.layers):
        for group, modules in layer.groups.items():
            scale = float(result.tensor(f"model.layers.{i}.{modules[0]}.input_scale"))
            beyond = layer.input_absmax[group] > 448 * scale  # the stored scale was rounded down
            assert (layer.input_clipped[group] > 0) == beyond
            assert layer.input_clipped[group] < 1e-3
            assert 0.2 < layer.range_used[group] <= 1
    assert any(share > 0 for layer in report.layers for share in layer.input_clipped.values())
    number = report.layers[0].range_used["down"]
    assert f'<td class="n">{number:.4g}</td>' in html(report)


def test_a_run_without_text_has_a_page_too(tmp_path):
    source = tiny_model("phi3", tmp_path / "source")
    job = prepare_job(
        open_checkpoint(source), Tokenizer.load(source), tmp_path / "out", Settings(scheme="fp8")
    )
    report = pipeline.run(job, progress=False)
    assert "<svg" not in html(report)
    headings = re.findall(r"<th[^>]*>([^<]+)</th>", html(report))
    assert headings[:4] == ["layer", "group", "scheme", "weight error"]  # nobody looked at anything else
    assert "no linear was left dense unasked" in html(report)
    assert re.search(r"\| 1 \| down \| w8a8-fp8 \| - \| - \| 0\.0\d+ \| - ", markdown(report))
