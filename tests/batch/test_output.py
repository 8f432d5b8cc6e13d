"""Answers on disk: in the input's order however they come in, and where a run that was cut off goes on."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.batch.lines import Line
from qinfer.batch.output import OrderedOutput, Outcome, written_before
from qinfer.errors import UserError
from qinfer.server.errors import Failure

NUM = 8
ID0 = '{"custom_id": "id0", "response": null}\n'


def line(place):
    return Line(place, place + 1, f"id{place}", "/v1/completions", {"prompt": "x"}, 20)


def outcome(place, *, failed=False):
    failure = Failure(400, f"bad {place}", "prompt") if failed else None
    return Outcome(line(place), f"qinfer-{place}", None if failed else f'{{"n": {place}}}', failure)


def ids(path):
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    entries = [{"custom_id": f"id{i}", "prompt": "x"} for i in range(NUM)]
    path.write_text("\n\n".join(map(json.dumps, entries)))
    return path


def test_the_lines_are_openais(tmp_path):
    with OrderedOutput(tmp_path / "out", None, 0) as output:
        output.put(outcome(0))
        output.put(outcome(1, failed=True))
    good, bad = map(json.loads, (tmp_path / "out").read_text().splitlines())
    response = {"status_code": 200, "request_id": "qinfer-0", "body": {"n": 0}}
    assert good == {"id": "qinfer-0", "custom_id": "id0", "response": response, "error": None}
    error = {"message": "bad 1", "type": "BadRequestError", "param": "prompt", "code": 400}
    assert bad["response"] == {"status_code": 400, "request_id": "qinfer-1", "body": {"error": error}}
    assert bad["error"] == {"code": "BadRequestError", "message": "bad 1", "param": "prompt"}


def test_a_file_of_errors(tmp_path):
    with OrderedOutput(tmp_path / "out", tmp_path / "err", 0) as output:
        output.put(outcome(1, failed=True))
        output.put(outcome(0))
    assert ids(tmp_path / "out") == ["id0"]
    (bad,) = map(json.loads, (tmp_path / "err").read_text().splitlines())
    assert bad["response"] is None
    assert bad["error"]["message"] == "bad 1"
    assert output.num_failed == 1


@given(order=st.permutations(range(NUM)), stop=st.integers(0, NUM))
def test_what_is_on_disk_is_always_a_beginning(tmp_path_factory, order, stop):
    path = tmp_path_factory.mktemp("out") / "out"
    with OrderedOutput(path, None, 0) as output:
        for place in order[:stop]:
            output.put(outcome(place))
            seen = set(order[: order.index(place) + 1])
            first = next(i for i in range(NUM + 1) if i not in seen)
            assert output.first == first
            assert ids(path) == [f"id{i}" for i in range(first)]
            waiting = [outcome(i).text(apart=False) for i in seen if i >= first]
            assert output.held == sum(map(len, waiting))


@given(failed=st.sets(st.integers(0, NUM - 1)), done=st.integers(0, NUM), cut=st.integers(0, 30))
def test_a_run_goes_on_where_the_files_end(tmp_path_factory, failed, done, cut):
    folder = tmp_path_factory.mktemp("resume")
    source = folder / "in"
    source.write_text("\n".join(json.dumps({"custom_id": f"id{i}", "prompt": "x"}) for i in range(NUM)))
    out, err = folder / "out", folder / "err"
    with OrderedOutput(out, err, 0) as output:
        for place in range(done):
            output.put(outcome(place, failed=place in failed))
    last = err if done - 1 in failed else out
    with last.open("ab") as file:
        file.write(b'{"id": "qinfer-half a line that was never ended'[:cut])
    assert written_before(source, out, err) == (done, sum(place < done for place in failed))
    with OrderedOutput(out, err, done) as output:
        for place in reversed(range(done, NUM)):
            output.put(outcome(place, failed=place in failed))
    assert ids(err) == [f"id{i}" for i in sorted(failed)]
    assert ids(out) == [f"id{i}" for i in range(NUM) if i not in failed]
    assert written_before(source, out, err) == (NUM, len(failed))


def test_nothing_written_yet(tmp_path, source):
    assert written_before(source, tmp_path / "out", None) == (0, 0)
    (tmp_path / "out").write_bytes(b'{"id": "qinfer-7a')
    assert written_before(source, tmp_path / "out", None) == (0, 0)
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"custom_id": "id1", "response": null}\n', "after 0 requests it answers 'id1'"),
        (f'{ID0}{{"custom_id": "other", "response": null}}\n', "after 1 requests it answers 'other'"),
        (f"{ID0}not json\n", "line 2 is no answer of a batch"),
        (f'{ID0}{{"custom_id": "other", "response": null}}\nhalf', "after 1 requests it answers 'other'"),
        ('{"custom_id": "id0", "prompt": "x"}\n', "line 1 is no answer of a batch"),
        ("a note without an end", "line 1 is no answer of a batch"),
        ("a note\nand half another", "line 1 is no answer of a batch"),
        ('{"id": "mine", "custom_id": "id0", "response": null}', "line 1 is no answer of a batch"),
    ],
)
def test_answers_to_something_else(tmp_path, source, text, said):
    out: Path = tmp_path / "out"
    out.write_text(text)
    with pytest.raises(UserError, match=said):
        written_before(source, out, None)
    assert out.read_text() == text
