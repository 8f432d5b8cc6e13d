"""`qinfer batch` on a tiny model: exit codes, places, resuming, the example that comes with it."""

import json
import signal
from pathlib import Path

import pytest

from qinfer.batch.output import OrderedOutput, written_before
from qinfer.testing import tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "batch.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("smollm2", tmp_path_factory.mktemp("batch") / "model")


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": f"{i}", "max_tokens": 3, "temperature": 0, "ignore_eos": True} for i in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_example(qinfer, model, tmp_path):
    out = tmp_path / "out.jsonl"
    words = ("-i", EXAMPLE, "-o", out, "--served-model-name", "m", "--json")
    code, stdout, stderr = qinfer("batch", model, *words)
    assert code == 0, stderr
    document = json.loads(stdout)
    asked = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    assert (document["num_lines"], document["num_failed"]) == (len(asked), 0)
    assert [line["response"]["status_code"] for line in answers(out)] == [200] * len(asked)
    assert [line["custom_id"] for line in answers(out)] == [
        line.get("custom_id", f"line-{number}") for number, line in enumerate(asked, 1)
    ]
    assert document["output_tokens"] > 0
    assert "will fail" not in stderr


def test_a_run_is_resumed(qinfer, model, source, tmp_path):
    out = tmp_path / "out.jsonl"
    assert qinfer("batch", model, "-i", source, "-o", out).code == 0
    whole = answers(out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    code, stdout, stderr = qinfer("batch", model, "-i", source, "-o", out)
    assert (code, stdout) == (2, "")
    assert "--resume goes on, --overwrite begins anew" in stderr
    code, stdout, _ = qinfer("batch", model, "-i", source, "-o", out, "--resume", "--json")
    assert code == 0
    assert json.loads(stdout)["num_resumed"] == 2
    texts = [line["response"]["body"]["choices"][0]["text"] for line in answers(out)]
    assert texts == [line["response"]["body"]["choices"][0]["text"] for line in whole]
    code, stdout, stderr = qinfer("batch", "/no/model", "-i", source, "-o", out, "--resume")  # needs no model
    assert code == 0
    assert stdout == f"{out}: 5 lines, 5 of them before\n"
    code, stdout, _ = qinfer("batch", model, "-i", source, "-o", out, "--overwrite")
    assert code == 0
    assert "5 lines in" in stdout
    assert len(answers(out)) == 5


def test_lines_that_fail_are_told_before_and_after(qinfer, model, source, tmp_path):
    with source.open("a") as file:
        file.write('{"prompt": "x", "stream": true}\n')
    out, err = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    code, stdout, stderr = qinfer("batch", model, "-i", source, "-o", out, "--error-file", err)
    assert code == 1
    assert "line 6: a line of a batch cannot stream: leave out stream\n1 of 6 lines will fail\n" in stderr
    assert f"1 failed, see {err}" in stdout
    assert (len(answers(out)), len(answers(err))) == (5, 1)
    code, stdout, stderr = qinfer("batch", model, "-i", source, "-o", out, "--error-file", err, "--resume")
    assert code == 1  # what failed before has still failed
    assert stdout == f"{out}: 6 lines, 6 of them before; 1 failed, see {err}\n"
    code, stdout, stderr = qinfer("batch", model, "-i", source, "-o", tmp_path / "new", "--fail-fast")
    assert (code, stdout) == (2, "")
    assert "no line was asked" in stderr
    assert not (tmp_path / "new").exists()


def test_metrics_while_it_runs(qinfer, model, source, tmp_path):
    words = ("--enable-metrics", "--port", 0)
    code, _, stderr = qinfer("batch", model, "-i", source, "-o", tmp_path / "out.jsonl", *words)
    assert code == 0
    assert "metrics at http://127.0.0.1:" in stderr


def test_an_interrupted_run_leaves_a_beginning(qinfer, model, source, tmp_path, monkeypatch):
    out, put = tmp_path / "out.jsonl", OrderedOutput.put

    def interrupted(self, outcome):
        put(self, outcome)
        if self.first == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(OrderedOutput, "put", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    try:
        code, _, stderr = qinfer("batch", model, "-i", source, "-o", out, "--max-inflight", 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, stderr.splitlines()[-1]) == (130, "qinfer: interrupted")
    assert "Traceback" not in stderr
    assert written_before(source, out, None) == (2, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-i", "{in}", "-o", "{in}"), "must be different files"),
        (("-i", "{in}", "-o", "{tmp}/o", "--error-file", "{tmp}/o"), "must be different files"),
        (("-i", "{in}", "-o", "{tmp}/no/o"), "there is no such folder"),
        (("-i", "{tmp}/none", "-o", "{tmp}/o"), "cannot be read: No such file"),
        (("-i", "{in}", "-o", "{tmp}/o", "--resume", "--overwrite"), "take one of them"),
        (("-i", "{in}"), "--output-file"),
    ],
)
def test_mistakes_are_one_line_before_any_model_loads(qinfer, source, tmp_path, words, said):
    filled = [word.replace("{in}", str(source)).replace("{tmp}", str(tmp_path)) for word in words]
    code, stdout, stderr = qinfer("batch", "/no/model", *filled)
    assert (code, stdout) == (2, "")
    assert said in stderr
    assert stderr.count("\n") == 1


def test_a_folder_that_may_not_be_written_is_told_before_any_model_loads(
    qinfer, source, tmp_path, monkeypatch
):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    code, _, stderr = qinfer("batch", "/no/model", "-i", source, "-o", tmp_path / "out")
    assert (code, stderr.count("\n")) == (2, 1)
    assert f"{tmp_path / 'out'} may not be written: choose another folder" in stderr


@pytest.mark.parametrize("kind", ["dots", "symlink", "hardlink"])
def test_the_input_by_another_name_is_never_an_output(qinfer, source, tmp_path, kind):
    (tmp_path / "sub").mkdir()
    other, before = tmp_path / "sub" / "other", source.read_bytes()
    if kind == "dots":
        other = tmp_path / "sub" / ".." / source.name
    elif kind == "symlink":
        other.symlink_to(source)
    else:
        other.hardlink_to(source)
    for words in (("-o", other), ("-o", tmp_path / "o", "--error-file", other)):
        code, _, stderr = qinfer("batch", "/no/model", "-i", source, *words, "--overwrite")
        assert code == 2
        assert "must be different files" in stderr
    assert source.read_bytes() == before


def test_overwriting_keeps_the_old_answers_until_there_can_be_new_ones(qinfer, model, source, tmp_path):
    out, err, bad = tmp_path / "out.jsonl", tmp_path / "err.jsonl", tmp_path / "bad.jsonl"
    bad.write_text("no request\n")
    for path in (out, err):
        path.write_text("old\n")
    words = ("-o", out, "--error-file", err, "--overwrite")
    assert qinfer("batch", model, "-i", bad, *words).code == 2
    assert qinfer("batch", "/no/model", "-i", source, *words).code == 2
    assert [path.read_text() for path in (out, err)] == ["old\n"] * 2
    assert qinfer("batch", model, "-i", source, *words).code == 0
    assert (len(answers(out)), err.read_text()) == (5, "")
    assert "is a folder" in qinfer("batch", model, "-i", source, "-o", tmp_path, "--overwrite").stderr
