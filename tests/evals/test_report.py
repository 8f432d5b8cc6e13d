"""The report says the verdict first, then why; JSON, Markdown and HTML hold the same numbers."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import UserError
from qinfer.evals import plots, report, report_choice
from qinfer.evals.blame import Blame, Part
from qinfer.evals.gate import GateResult, Measure, Verdict
from qinfer.evals.report_html import report_page
from qinfer.evals.statistics import Interval

EVIL = '<script>alert(1)</script> & "quoted" |\n```\nend'
EVIDENCE = {
    "tasks": [
        {
            "task": "piqa",
            "metric": "acc",
            "items": 500,
            "source": 0.66,
            "candidate": 0.652,
            "difference": {"value": -0.008, "low": -0.021, "high": 0.005},
            "lost": 12,
            "won": 8,
            "p_value": 0.5034,
            "recovery": 0.95,
        },
        {
            "task": "guess",
            "metric": "acc",
            "items": 50,
            "source": 0.25,
            "candidate": 0.26,
            "difference": {"value": 0.01, "low": None, "high": None},
            "lost": 2,
            "won": 3,
            "p_value": 1.0,
            "recovery": None,
        },
    ],
    "spent": [
        {
            "name": "tasks",
            "unit": "questions",
            "done": 550,
            "size": 900,
            "seconds": 12.34,
            "confidence": 0.98,
            "needed": 2100,
            "silence": "",
        }
    ],
}
EXAMPLES = {
    "regressions": [
        {
            "task": "piqa",
            "question": 7,
            "prompt": EVIL,
            "prompt_of_candidate": None,
            "target": "right",
            "source": "right",
            "candidate": EVIL,
            "choices": [
                {"text": "right", "source": -1.5, "candidate": -4.25},
                {"text": EVIL, "source": -2.0, "candidate": None},
            ],
        }
    ],
    "moved": [
        {
            "window": 3,
            "position": 17,
            "kl": 2.5,
            "context": EVIL,
            "next": " x",
            "source": [{"token": " yes", "probability": 0.5}],
            "candidate": [{"token": EVIL, "probability": 0.25}],
        }
    ],
    "kl_quantiles": [(0.0, 1e-5), (0.5, 1e-3), (1.0, 2.5)],
}
RESULT = GateResult(
    Verdict.FAIL,
    ("mean KL is too high",),
    (
        Measure("mean KL", "nats/token", Interval(0.5, 0.4, 0.6), 0.2),
        Measure("top-1 agreement", "of positions", Interval(0.7, 0.6, 0.8), 0.78, "at least"),
        Measure("p99 KL", "nats", Interval(math.nan, -math.inf, math.inf), 1.5),
        Measure("perplexity of the source", "per token", Interval(16.3, 15.0, 17.0)),
    ),
    {"command": "qinfer eval 'a b'", "model": "a|b", "against": "<ref>", "schemes": ["w4a16 g64"], "seed": 0},
    Blame((Part("embedding", 0.0, 0.0), Part("layer 0", 0.1, 0.01), Part("layer 1", 0.9, 0.4)), 0.5, 1024),
    EVIDENCE,
    EXAMPLES,
)


def test_verdict_first_then_reasons_then_measures_then_settings() -> None:
    lines = report.markdown(RESULT.to_dict()).splitlines()
    assert lines[0] == "# FAIL: it is not close enough to its source to be served in its place"
    assert lines[2] == "* mean KL is too high"
    assert "| mean KL | 0.5 nats/token | 0.4 to 0.6 | at most 0.2 | FAIL | 0.04883 | 0.3512 |" in lines
    agreement = "| top-1 agreement | 0.7 of positions | 0.6 to 0.8 | at least 0.78 | UNDECIDED | "
    assert sum(line.startswith(agreement) for line in lines) == 1
    p99 = "| p99 KL | not finite nats | not finite to not finite | at most 1.5 | FAIL | "
    assert sum(line.startswith(p99) for line in lines) == 1
    assert "| perplexity of the source | 16.3 per token | 15 to 17 |  | reported |  |  |" in lines
    assert "| model | a\\|b |" in lines
    assert '| schemes | ["w4a16 g64"] |' in lines
    order = [lines.index("* mean KL is too high"), lines.index("## Settings"), lines.index("| seed | 0 |")]
    assert order == sorted(order)


def test_markdown_tells_tasks_cost_and_regressions_and_nothing_breaks_out() -> None:
    text = report.markdown(RESULT.to_dict(), EXAMPLES)
    assert "| piqa (acc) | 500 | 66 % | 65.2 % | -0.8 % [-2.1 %, 0.5 %] | 12 / 8 | 0.5034 | 95 % |" in text
    assert "| guess (acc) | 50 | 25 % | 26 % | 1 % [not finite, not finite] | 2 / 3 | 1 | no better" in text
    assert "* tasks: 550 of 900 questions in 12.3 s; about 2100 would decide it" in text
    assert "layer 1 is to blame" in text
    lines = text.splitlines()
    start = lines.index("### piqa, question 7") + 2
    assert lines[start] == "````"
    assert lines[start + 1 : start + 5] == [*EVIL.split("\n"), "````"]
    (cell,) = (line for line in lines if line.startswith("| right | right | <script>"))
    assert cell.count("|") - cell.count("\\|") == 4


class Page(HTMLParser):
    """What a browser would see: tags balanced, texts, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "line", "circle", "rect", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def page() -> tuple[str, Page]:
    text = report_page(RESULT.to_dict(), EXAMPLES)
    return text, Page(text)


def test_the_page_is_one_file_whose_tags_close(page: tuple[str, Page]) -> None:
    text, parsed = page
    assert parsed.open == []
    assert parsed.fetched == []
    assert "script" not in parsed.tags
    assert "@import" not in text
    assert "url(" not in text
    assert text.startswith('<!doctype html>\n<html lang="en">')


def test_the_page_tells_what_the_other_two_tell(page: tuple[str, Page]) -> None:
    _, parsed = page
    told = parsed.text
    places = [
        told.index(part)
        for part in ("✗ FAIL", "mean KL is too high", "layer 1 is to blame", "0.4 to 0.6", "piqa (acc)")
    ]
    places += [told.index(part) for part in ("Worst regressions", "Where the text moved most", "seed")]
    assert places == sorted(places)
    for part in ("12 / 8", "0.5034", "no better than chance", "about 2100", "passes 0.04883, fails 0.3512"):
        assert part in told
    assert told.count(EVIL) >= 4  # prompt, answer, choice, context: as text
    assert "qinfer eval 'a b'" in told
    assert "<ref>" in told


def test_the_page_draws_intervals_layers_and_quantiles(page: tuple[str, Page]) -> None:
    text, parsed = page
    assert parsed.tags.count("svg") == 2 + 1 + 1  # two measures have a limit and numbers
    assert text.count('class="bar"') == 2
    assert text.count('class="bar worst"') == 1
    assert text.count('role="img"') == parsed.tags.count("svg") == text.count("<svg")
    assert all(word in text for word in ("prefers-color-scheme: dark", "@media print"))


def test_a_verdict_without_measures_has_a_page() -> None:
    result = GateResult(Verdict.UNDECIDED, ("nothing was measured",), (), {"model": "m", "against": "r"})
    parsed = Page(report_page(result.to_dict(), {}))
    assert parsed.open == []
    assert "Measures" not in parsed.text
    assert "? UNDECIDED" in parsed.text


def test_an_interval_is_drawn_where_its_numbers_are() -> None:
    (measure,) = [m for m in RESULT.to_dict()["measures"] if m["name"] == "mean KL"]
    drawn = plots.interval(measure)
    limit, low, high = (
        float(found)
        for pattern in (
            r'class="limit" x1="([\d.]+)',
            r'class="span" x1="([\d.]+)',
            r'class="span".*?x2="([\d.]+)',
        )
        for found in re.findall(pattern, drawn)
    )
    assert limit < low < high
    assert (low - limit) / (high - limit) == pytest.approx(0.5, abs=0.01)  # 0.2, 0.4, 0.6


def test_write_makes_three_files_that_agree(tmp_path: Path) -> None:
    report.write(tmp_path / "new" / "report.html", RESULT)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    document = json.loads((tmp_path / "new" / "report.json").read_text())
    assert document["examples"]["regressions"][0]["prompt"] == EVIL
    assert document["evidence"] == EVIDENCE
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report.write(tmp_path / "file" / "report", RESULT)


def test_json_is_standard_and_complete() -> None:
    document = json.loads(json.dumps(RESULT.to_dict(), allow_nan=False))
    assert document["verdict"] == "FAIL"
    assert document["confidence"] == 0.9
    assert "examples" not in document  # prompts are for the report, not for the certificate
    mean_kl, _, p99, perplexity = document["measures"]
    assert mean_kl.pop("power") == pytest.approx({"passes_at": 0.04883, "fails_at": 0.35117}, abs=1e-5)
    assert mean_kl == {
        "name": "mean KL",
        "unit": "nats/token",
        "value": 0.5,
        "low": 0.4,
        "high": 0.6,
        "confidence": 0.9,
        "bound": "at most",
        "limit": 0.2,
        "verdict": "FAIL",
    }
    assert (p99["value"], p99["high"], p99["verdict"]) == (None, None, "FAIL")
    assert (perplexity["limit"], perplexity["verdict"], perplexity["bound"]) == (None, None, None)


def test_text_for_a_terminal() -> None:
    lines = RESULT.to_text().splitlines()
    assert lines[0] == "FAIL"
    assert lines[1] == "  mean KL is too high"
    assert lines[-1] == "  perplexity of the source 16.3 [15, 17] per token"


def choice_document() -> dict[str, Any]:
    def option(
        name: str, size: int, speed: float, value: float | None, verdict: str, best: bool
    ) -> dict[str, Any]:
        low, high = (None, None) if value is None else (value - 0.01, value + 0.01)
        return {
            "name": name,
            "schemes": ["w8a8-int8"],
            "bytes": size,
            "tokens_per_second": speed,
            "quality": {"value": value, "low": low, "high": high},
            "worth_choosing": best,
            "result": {**RESULT.to_dict(), "verdict": verdict},
        }

    return {
        "verdict": "FAIL",
        "quality": "recovery on tasks",
        "source": {"name": "src", "bytes": 269_000_000, "tokens_per_second": 20.0},
        "options": [
            option("int8", 163_000_000, 30.0, 0.99, "PASS", True),
            option("a<wq", 114_000_000, 25.0, 0.93, "PASS", True),
            option("broken", 114_000_000, 25.0, None, "FAIL", False),
        ],
    }


def test_several_candidates_on_one_page(tmp_path: Path) -> None:
    report_choice.write(tmp_path / "choice", choice_document())
    text = (tmp_path / "choice.html").read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert text.count('class="good"') == 2  # spots of those that are worth choosing; the third has no number
    points = re.findall(r'class="front" points="([^"]*)"', text)[0].split()
    (x_small, y_small), (x_large, y_large) = (tuple(map(float, point.split(","))) for point in points)
    assert x_small < x_large
    assert y_small > y_large  # further down: awq recovers less
    assert "a<wq" in parsed.text
    rows = (tmp_path / "choice.md").read_text().splitlines()
    assert "| int8 | w8a8-int8 | 163.0 | 30.0 | 99 % [98 %, 100 %] | PASS | worth choosing |" in rows
    assert "| broken | w8a8-int8 | 114.0 | 25.0 | not finite [not finite, not finite] | FAIL |  |" in rows
    assert json.loads((tmp_path / "choice.json").read_text())["source"]["name"] == "src"
