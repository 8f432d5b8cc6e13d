"""What a line is: the batch format and bare bodies, where lines end, what is refused before a model loads."""

import json

import pytest

from qinfer.batch import check as check_module
from qinfer.batch import lines as lines_module
from qinfer.batch.check import check
from qinfer.batch.lines import LineFault, parse, raw_lines, request_of
from qinfer.errors import UserError
from qinfer.server.errors import Failure


def entry(custom_id="a", url="/v1/completions", **body):
    body = body or {"prompt": "x"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path, entries):
    path.write_text("".join(json.dumps(one) + "\n" for one in entries))
    return path


def test_a_line_of_the_batch_format():
    line = parse(json.dumps(entry("é")).encode(), 3, 7)
    assert (line.place, line.number, line.custom_id, line.url) == (3, 7, "é", "/v1/completions")
    assert line.body == {"prompt": "x"}


@pytest.mark.parametrize(
    ("bare", "url"),
    [
        ({"prompt": "x", "max_tokens": 3}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"),
    ],
)
def test_bare_bodies_are_named_after_their_line(bare, url):
    line = parse(json.dumps(bare).encode(), 0, 7)
    assert (line.custom_id, line.url, line.body) == ("line-7", url, bare)
    assert parse(json.dumps({**bare, "custom_id": "mine"}).encode(), 0, 7).custom_id == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "neither a batch line"),
        ('{"prompt": "x", "custom_id": 5}', "custom_id must be a text"),
        (json.dumps(entry(custom_id="")), "custom_id must be a text"),
        (json.dumps({**entry(), "method": "GET"}), "method must be \"POST\", not 'GET'"),
        (json.dumps(entry(url="/v1/models")), "url must be one of /v1/chat/completions, "),
        (json.dumps({**entry(), "url": ["x"]}), "url must be one of"),
        (json.dumps({**entry(), "body": "x"}), "body must be a JSON object"),
    ],
)
def test_what_is_no_line(text, said):
    with pytest.raises(LineFault, match=said):
        parse(text.encode(), 0, 1)


def test_lines_end_at_newlines_alone_and_blank_ones_are_passed_over(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n {}\r\n\n\t\n" + '"\u2028\x85\x0c"\n'.encode() + b"last")
    assert list(raw_lines(path)) == [(2, b" {}\r\n"), (5, '"\u2028\x85\x0c"\n'.encode()), (6, b"last")]


def test_a_line_too_long_is_never_held_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_BODY_BYTES", 10)
    monkeypatch.setattr(lines_module, "_READ", 11)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 95 + b"\n" + b"y" * 9 + b"\n" + b"z" * 11 + b"\n" + b"w" * 33)
    found = list(raw_lines(path))
    assert [(number, len(raw)) for number, raw in found] == [(1, 11), (2, 10), (3, 11), (4, 11)]
    for place in (0, 2, 3):
        with pytest.raises(LineFault, match="longer than"):
            parse(found[place][1], 0, 1)
    with pytest.raises(LineFault, match="not JSON"):
        parse(found[1][1], 0, 1)


def test_lengths_are_of_prompt_and_answer():
    def tokens(**one):
        return parse(json.dumps(one).encode(), 0, 1).tokens()

    short = tokens(**entry(prompt="x", max_tokens=5))
    assert tokens(**entry(prompt="x" * 400, max_tokens=5)) - short == pytest.approx(100, abs=1)
    assert tokens(**entry(prompt="x", max_tokens=50)) == short + 45
    chat = "/v1/chat/completions"
    assert tokens(**entry(url=chat, messages=[])) > tokens(**entry(url=chat, messages=[], max_tokens=5))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x", "stream": True}, 400, "stream"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": "x", "n": "many"}, 400, "n"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
    ],
)
def test_a_body_that_its_route_refuses_is_what_the_server_says(body, status, param):
    failure = request_of(parse(json.dumps(entry(**body)).encode(), 0, 1), ("tiny",))
    assert isinstance(failure, Failure)
    assert (failure.status, failure.param) == (status, param)


def test_a_line_cannot_run_in_the_background():
    body = {"input": "x", "background": True}
    failure = request_of(parse(json.dumps(entry(url="/v1/responses", **body)).encode(), 0, 1), ("tiny",))
    assert isinstance(failure, Failure)
    assert (failure.status, failure.param) == (400, "background")


def test_the_check_counts_and_tells_what_will_fail(tmp_path):
    entries = [entry(str(i), prompt="x", temperature="hot" if i % 3 == 0 else 1) for i in range(40)]
    checked = check(written(tmp_path / "in.jsonl", entries), ("tiny",))
    assert (checked.num_lines, checked.num_bad) == (40, 14)
    assert len(checked.told) == check_module.MAX_TOLD
    assert checked.told[1].startswith("line 4: temperature: ")


@pytest.mark.parametrize(
    ("url", "body", "said"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": 7}, "temperature must be"),
        ("/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, "n is 2 with"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 0}, "top_p must"),
        ("/v1/responses", {"input": "x", "temperature": -1}, "temperature must be"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 99}, None),  # a model may have its own default
        ("/v1/completions", {"prompt": "x", "max_tokens": 1 << 20}, None),  # cut to the context
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None),
        ("/v1/responses", {"input": "x"}, None),
        ("/v1/embeddings", {"input": "x"}, None),
    ],
)
def test_values_that_any_model_refuses_are_told_before_one_is_loaded(tmp_path, url, body, said):
    checked = check(written(tmp_path / "in.jsonl", [entry(url=url, **body)]), ("tiny",))
    assert checked.num_bad == len(checked.told) == (said is not None)
    if said is not None:
        assert checked.told[0].startswith(f"line 1: {said}")


def test_lines_that_are_none_stop_everything_and_are_named(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([json.dumps(entry()), "{", json.dumps(entry(url="/x"))] + ["[]"] * 20))
    with pytest.raises(UserError, match=r"line 2: not JSON.*line 3: url must be.*\(and 12 more\)"):
        check(path, ("tiny",))


def test_an_id_may_occur_once(tmp_path, monkeypatch):
    entries = [entry(f"id{i}") for i in range(50)]
    path = written(tmp_path / "in.jsonl", [*entries, entry("id7"), {"prompt": "x", "custom_id": "id9"}])
    with pytest.raises(UserError, match=r"line 51: custom_id 'id7' is that of line 8; line 52: .* line 10$"):
        check(path, ("tiny",))
    monkeypatch.setattr(check_module, "_hash", lambda custom_id: 5)  # every hash agrees with every other
    assert check(written(path, entries), ("tiny",)).num_lines == 50


def test_a_file_without_a_request(tmp_path):
    (tmp_path / "in.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no request"):
        check(tmp_path / "in.jsonl", ("tiny",))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        check(tmp_path / "none.jsonl", ("tiny",))
