"""The tokenizer as the model's files say: ids, templates, ends of text, threads (cases Q27, T08, T11)."""

import json
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from qinfer.errors import CheckpointError, UnsupportedModelError, UserError
from qinfer.tokenizer import Tokenizer

TEXTS = ["Hello world! Café déjà vu — 123 😊", "  two  spaces\n\n", "<|im_start|>user", "12345", ""]


@pytest.fixture(scope="module")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder)


@pytest.fixture
def folder(byte_level_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(byte_level_folder, tmp_path / "model"))


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", ["byte_level_folder", "sentencepiece_folder"])
def test_q27_same_ids_as_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    ours, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert (
            ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        )
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True
        )


def test_q27_name_of_a_special_token_in_a_text_is_that_token(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>user")[0] == 257
    assert byte_level.special_ids == {256, 257, 258}


def test_text_begins_with_bos_where_the_tokenizers_template_says_so(
    byte_level: Tokenizer, sentencepiece_folder: Path
) -> None:
    sentencepiece = Tokenizer.load(sentencepiece_folder)
    assert sentencepiece.adds_bos
    assert sentencepiece.encode("the")[0] == 1
    assert sentencepiece.encode("the", add_special_tokens=False)[0] != 1
    assert not byte_level.adds_bos


def test_q27_split_in_tokenizer_json_counts_whatever_class_is_named(folder: Path) -> None:
    """transformers' GPT2Tokenizer would rebuild the split without the digits."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    split = Tokenizer.load(folder).hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in split] == ["a", "ĠĠ", "1", "2"]


def test_t08_ends_of_text_are_the_union_of_all_files(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=257)
    change(folder / "generation_config.json", eos_token_id=[0])
    assert Tokenizer.load(folder).eos_token_ids == {0, 257, 258}
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == {257, 258}
    for odd in ("2", 1.5, [None], {"a": 1}, True):
        change(folder / "config.json", eos_token_id=odd)
        with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id is .*; it must be a token id"):
            Tokenizer.load(folder)


def test_t11_threads_get_the_ids_of_a_serial_run(byte_level: Tokenizer) -> None:
    texts = [f"the {i} thing <|im_end|> é" * (1 + i % 7) for i in range(64)]

    def work(i: int) -> tuple[list[int], str, list[int]]:
        ids = byte_level.encode(texts[i])
        cut = ids[-8:] if i % 2 else ids  # truncation slices; it never touches the shared object
        chat = byte_level.apply_chat_template([{"role": "user", "content": texts[i]}])
        return cut, byte_level.decode(cut), chat

    serial = [work(i) for i in range(64)]
    with ThreadPoolExecutor(32) as pool:
        for _ in range(5):
            assert list(pool.map(work, range(64))) == serial


def test_lone_surrogate_is_a_users_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"lone surrogate, U\+D83D, at character 2"):
        byte_level.encode("é \ud83d oops")


def test_chat_template_writes_the_conversation(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|im_end|>\n"
    ids = byte_level.apply_chat_template(messages)
    assert byte_level.decode(ids, skip_special_tokens=False) == expected + "<|im_start|>assistant\n"
    ids = byte_level.apply_chat_template(messages, add_generation_prompt=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    ids = byte_level.apply_chat_template(parts, add_generation_prompt=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == expected.replace("hi", "h\ni")


def test_final_message_is_left_open(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    ids = byte_level.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert byte_level.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nThe answer")
    with pytest.raises(UserError, match="add_generation_prompt=False"):
        byte_level.apply_chat_template(messages, continue_final_message=True)


def test_template_begins_once_with_bos(sentencepiece_folder: Path) -> None:
    """A template writes BOS itself; encoding what it wrote adds no second."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{{ mood }}"
    tokenizer = Tokenizer.load(sentencepiece_folder, chat_template=template)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], mood="in")
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "thein"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a 'role'"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url': only text"),
        (
            [{"role": "user", "content": None}],
            r"messages\[0\] has no content: only an assistant's may be None",
        ),
        ([{"role": "tool"}], r"messages\[0\] has no content"),
    ],
)
def test_malformed_messages(byte_level: Tokenizer, messages: list, said: str) -> None:
    with pytest.raises(UserError, match=said):
        byte_level.apply_chat_template(messages)


def test_h05_an_assistant_that_called_tools_may_have_said_nothing(byte_level: Tokenizer) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    user = {"role": "user", "content": "hi"}
    silent = {"role": "assistant", "content": None, "tool_calls": calls}
    for said in (silent, {"role": "assistant", "tool_calls": calls}):
        same = [user, {**said, "content": ""}]
        assert byte_level.apply_chat_template([user, said]) == byte_level.apply_chat_template(same)


def test_template_that_refuses_or_is_broken(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(UserError, match="roles must alternate"):
        byte_level.apply_chat_template(
            messages, chat_template="{{ raise_exception('roles must alternate') }}"
        )
    with pytest.raises(UserError, match="the chat template refuses"):
        byte_level.apply_chat_template(messages, chat_template="{% for %}")
    with pytest.raises(UserError, match="'tokenize' is not a variable"):
        byte_level.apply_chat_template(messages, tokenize=True)


def test_template_given_at_load_is_a_file_or_inline(folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}!")
    for given in (str(tmp_path / "t.jinja"), "{{ messages[0]['content'] }}!"):
        tokenizer = Tokenizer.load(folder, chat_template=given)
        assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "x!"
    with pytest.raises(UserError, match=r"'no-such.jinja' is neither a file nor a Jinja template"):
        Tokenizer.load(folder, chat_template="no-such.jinja")


def test_model_without_a_template_says_so(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_token_strings_and_bytes(byte_level: Tokenizer, sentencepiece_folder: Path) -> None:
    assert byte_level.token_str(258) == "<|im_end|>"
    assert byte_level.token_bytes(0xE2) == b"\xe2"
    assert byte_level.token_str(0xE2) == "\ufffd"
    assert byte_level.token_bytes(99_999) == b""
    sentencepiece = Tokenizer.load(sentencepiece_folder)
    assert sentencepiece.token_bytes(3 + 0x0A) == b"\n"
    assert sentencepiece.token_str(sentencepiece.encode("the")[1]) == " the"
    assert (byte_level.vocab_size, byte_level.bos_token_id, byte_level.adds_bos) == (384, 256, False)


def test_damaged_or_missing_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(folder)


def test_decoder_of_another_kind_is_refused(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=r"decoder \['WordPiece'\] is not supported"):
        Tokenizer.load(folder)


COMES_OVER = """
import pickle, sys
from qinfer.tokenizer import import_transformers
import_transformers()
before = set(sys.modules)
ids = pickle.loads(sys.stdin.buffer.read()).encode("Hello")
print(ids, sorted(set(sys.modules) - before))
"""


def test_what_a_server_imports_while_its_engine_loads_is_all_that_the_tokenizer_needs(
    byte_level: Tokenizer,
) -> None:
    command, pickled = [sys.executable, "-c", COMES_OVER], pickle.dumps(byte_level)
    said = subprocess.run(command, input=pickled, stdout=subprocess.PIPE, check=True).stdout.decode()
    assert said == f"{byte_level.encode('Hello')} []\n"
