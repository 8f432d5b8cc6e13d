"""Calibration sequences: sources, limits, chat templates, seeds, and messages for what cannot be read."""

import json

import pytest

from qinfer.calibrate.data import as_conversation, calibration_sequences, check_source, passages
from qinfer.calibrate.selftext import engine_generate, self_prompts
from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.corpus import reference_text
from qinfer.errors import UserError
from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer

BOS, IM_START, IM_END = 256, 257, 258


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("smollm2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.load(model)


@pytest.fixture
def base(model, tokenizer, tmp_path):
    """The same tokenizer without a chat template."""
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return Tokenizer.load(tmp_path)


def _no_generate(*_):
    raise AssertionError("no self-written text was asked for")


def _counting(prompts, seq_len, seed):
    return [[seed % 100, i] for i in range(len(prompts))]


def _sequences(spec, tokenizer, generate=_no_generate, **limits):
    limits = {"num_samples": 4, "max_seq_len": 128, **limits}
    return calibration_sequences(spec, tokenizer, generate, **limits)


def test_c08_limits_are_obeyed_for_documents(base):
    documents = ["word " * 20_000] + [f"sample {i} " * 200 for i in range(999)]
    data = _sequences(documents, base)
    assert len(data.sequences) == 4
    assert all(len(s) <= 128 for s in data.sequences)
    assert data.num_tokens <= 512
    assert data.record()["num_tokens"] == data.num_tokens


def test_c08_documents_without_end_are_not_read_to_it(base):
    def endless():
        i = 0
        while True:
            yield f"document number {i} of a stream"
            i += 1

    assert len(_sequences(endless(), base).sequences) == 4


def test_c06_every_length_is_used_whole(base):
    long, short = "a b " * 500, "tiny"
    data = _sequences([short, long], base, max_seq_len=100)
    assert sorted(map(len, data.sequences)) == [len(base.encode(short)), 100]
    assert data.num_tokens == 100 + len(base.encode(short))


def test_text_file_is_cut_at_blank_lines_into_full_sequences(base, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {i} says something or other." for i in range(400)))
    data = _sequences(str(path), base)
    assert [len(s) for s in data.sequences] == [128] * 4
    assert len(set(data.sequences)) == 4
    assert all(base.decode(s).startswith("Paragraph") for s in data.sequences)


def test_passages_lose_nothing_and_cut_long_paragraphs():
    text = "one two.\n\n" + "x" * 250 + "\n\nlast"
    pieces = passages(text, 100)
    assert all(len(piece) >= 100 for piece in pieces[:-1])
    assert "".join(pieces).replace("\n", "") == text.replace("\n", "")
    assert passages("", 10) == []


def test_chat_model_sees_text_through_its_template(tokenizer):
    data = _sequences(["First sentence. The rest of it follows here."], tokenizer)
    (ids,) = data.sequences
    expected = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "First sentence."},
            {"role": "assistant", "content": "The rest of it follows here."},
        ],
        add_generation_prompt=False,
    )
    assert list(ids) == expected
    assert ids[0] == IM_START


def test_conversation_keeps_all_of_the_text():
    for text in ("Title\n\nBody of it. More.", "One. Two.", "no end at all", "x" * 500, "Is it? Yes."):
        question, answer = as_conversation(text)
        joined = question["content"] + answer["content"]
        assert joined.replace(" ", "") == text.replace(" ", "").replace("\n\n", "")
        assert len(question["content"]) <= 201


def test_jsonl_takes_text_and_messages(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps({"text": "A. B c d."}) + "\n")
    data = _sequences(str(path), tokenizer)
    expected = tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=False))
    assert expected in data.sequences
    assert len(data.sequences) == 2


def test_base_model_reads_messages_as_plain_text(base):
    data = _sequences([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]], base)
    assert base.decode(data.sequences[0]) == "Hi\n\nYo"


def test_default_is_reference_text_with_a_quarter_self_written(tokenizer):
    data = _sequences(None, tokenizer, _counting, num_samples=8)
    assert data.kinds == (("reference text", 6), ("self-written", 2))
    text = "".join(tokenizer.decode(s) for s in data.sequences)
    assert not any(d.split("\n\n")[1][:60] in text for d in reference_text("evaluation"))
    written = [i for i, s in enumerate(data.sequences) if len(s) < 100]
    assert written == [2, 6]  # spread, not at the end


def test_self_text_starts_at_bos_and_at_chat_prompts(tokenizer):
    data = _sequences("self", tokenizer, _counting, num_samples=4, seed=42)
    assert data.kinds == (("self-written", 4),)
    assert data.sequences[0] == (BOS, 42, 0)
    assert data.sequences[1][0] == IM_START
    assert data.sequences[1][-2:] == (42, 1)
    assert len({s[:-2] for s in data.sequences}) == 3  # BOS twice, two different prompts


def test_base_model_without_bos_starts_at_its_end_token(base):
    base.bos_token_id = None
    assert self_prompts(base, 2) == [[BOS], [BOS]]  # the least of the EOS ids, 256


def test_same_seed_same_sequences_and_hash(base):
    documents = [f"document {i}" for i in range(50)]
    first, again = _sequences(documents, base, seed=7), _sequences(documents, base, seed=7)
    other = _sequences(documents, base, seed=8)
    assert first.record() == again.record()
    assert first.record()["sha256"] != other.record()["sha256"]


def test_engine_writes_the_same_text_for_the_same_seed(model, tokenizer):
    generate = engine_generate(open_checkpoint(model), tokenizer)
    first = _sequences("self", tokenizer, generate, max_seq_len=48)
    again = _sequences("self", tokenizer, generate, max_seq_len=48)
    assert first.sequences == again.sequences
    assert all(1 < len(s) <= 48 for s in first.sequences)
    assert len(set(first.sequences)) == 4


def test_a_bar_counts_the_tokens_that_are_written(model, tokenizer, capsys):
    generate = engine_generate(open_checkpoint(model), tokenizer)
    written = sum(len(ids) for ids in generate([[1, 2, 3], [4]], 24, 0))
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.replace("\n", "\r").rstrip("\r").split("\r")[-1]
    assert last.startswith("writing calibration text: 100%")
    assert f" {written}/{written} [" in last
    assert "token/s]" in last or "s/token]" in last
    assert f"0/{24 - 3 + 24 - 1} [" in captured.err  # it is there before the first token
    engine_generate(open_checkpoint(model), tokenizer, progress=False)([[1, 2, 3]], 24, 0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("missing.txt", ["missing.txt", "No such file"]),
        ("someone/dataset", ["someone/dataset", "datasets extra", "pip install 'qinfer[datasets]'"]),
        ([], ["no text"]),
        (["", "  \n "], ["no text"]),
    ],
)
def test_unreadable_sources_are_named(base, spec, parts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        _sequences(spec, base)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["missing.txt", "./missing.jsonl", "/missing", "a/b/c", "~/x", "", "x" * 300 + ".txt"]
)
def test_a_file_that_is_not_there_is_named_before_anything_is_read(spec):
    with pytest.raises(UserError, match=r"cannot read the calibration file .*: No such file") as caught:
        check_source(spec)
    assert spec in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.parameter == "calibration"


def test_sources_that_may_be_there_are_let_through(tmp_path):
    (tmp_path / "text.txt").touch()
    for spec in (None, "self", "dataset", "someone/data.set", str(tmp_path / "text.txt"), ["a document"]):
        check_source(spec)
    with pytest.raises(UserError, match=r"must end in \.txt or \.jsonl"):
        check_source(str(tmp_path))


def test_hub_dataset_rows_are_taken_lazily(base, monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, *, split, streaming):
            assert (name, split, streaming) == ("someone/texts", "train", True)
            return ({"text": f"row {i} of the set", "id": i} for i in iter(int, 1))

    monkeypatch.setitem(__import__("sys").modules, "datasets", Datasets)
    data = _sequences("someone/texts", base)
    assert all(base.decode(s).startswith("row 0 of") for s in data.sequences)
    assert data.source == "someone/texts"


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"txt": 1}', "line 1 has columns txt"), ("[1, 2]", "line 1 has list"), ("{", "line 1 is not JSON")],
)
def test_bad_jsonl_rows_are_named_by_line(base, tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        _sequences(str(path), base)


def test_existing_file_of_another_kind_says_what_is_read(base, tmp_path):
    path = tmp_path / "text.md"
    path.write_text("hello")
    with pytest.raises(UserError, match=r"must end in \.txt or \.jsonl"):
        _sequences(str(path), base)


@pytest.mark.parametrize("limits", [{"num_samples": 0}, {"max_seq_len": 1}])
def test_limits_below_the_least_are_refused(base, limits):
    with pytest.raises(UserError, match="is needed"):
        _sequences(["text"], base, **limits)
