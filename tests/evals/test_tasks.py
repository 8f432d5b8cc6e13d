"""Tasks by name: what is built in, what files may say, what is refused, and that portions make the whole."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from qinfer.checkpoint.checkpoint import open_checkpoint
from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions
from qinfer.errors import UserError
from qinfer.evals import tasks_by_rule, tasks_lm_eval
from qinfer.evals.rules import Draw
from qinfer.evals.scorer import Scorer
from qinfer.evals.tasks import load_tasks
from qinfer.evals.tasks_by_rule import task_named
from qinfer.evals.tasks_lm_eval import LMEvalTask
from qinfer.model.decoder import Decoder, load_decoder
from qinfer.testing import FakeRunner, tiny_model
from qinfer.tokenizer import Tokenizer

CHOICE = {"query": "Question: which?", "choices": ["a", "b"], "gold": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Decoder, Tokenizer]:
    return load_decoder(open_checkpoint(folder)), Tokenizer.load(folder)


def scorer_of(loaded: tuple[Decoder, Tokenizer], runner: Any = None) -> Scorer:
    decoder, tokenizer = loaded
    return Scorer(Engine(decoder, tokenizer, EngineOptions(num_kv_blocks=512), runner=runner), tokenizer)


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_draws_are_the_same_everywhere() -> None:
    draw = Draw("somewhere", 7)
    assert [draw.number(1, 100) for _ in range(6)] == [83, 7, 70, 97, 55, 45]
    assert draw.some("abcdef", 4) == ["e", "d", "b", "f"]


def test_questions_by_rule_stay_the_same() -> None:
    """Answers that were kept, and certificates, are about these."""
    digests = {}
    for name in tasks_by_rule.NAMES:
        task = task_named(name)
        text = repr([tuple(task.question(i)) for i in range(len(task))])
        digests[name] = sha256(text.encode()).hexdigest()[:16]
    assert digests == {
        "builtin_arithmetic": "4f41176ed9257281",
        "builtin_copying": "e4c26c269f5ece7a",
        "builtin_retrieval": "238b4107611efed6",
        "builtin_problems": "af59559e0fe28683",
        "builtin_counting": "63e59a98fadb3f36",
        "builtin_recital": "577c5f4d2cc5ffd8",
    }


@pytest.mark.parametrize("name", tasks_by_rule.NAMES)
def test_questions_by_rule_have_one_right_answer(name: str) -> None:
    task = task_named(name)
    questions = [task.question(i) for i in range(len(task))]
    assert len({question.prompt for question in questions}) > 0.7 * len(task)
    for question in questions:
        assert question.answer.startswith(" ")
        assert question.answer not in question.wrong
        assert len(set(question.wrong)) == len(question.wrong) == (3 if task.kind == "choice" else 0)


def test_sums_and_problems_are_right() -> None:
    for i in range(400):
        question = task_named("builtin_arithmetic").question(i)
        a, sign, b, _ = question.prompt.splitlines()[-1].split()
        assert int(question.answer) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
    for i in range(100):
        answer = task_named("builtin_problems").question(i).answer
        sum_, _, result = answer.partition(". The answer is ")
        a, sign, b, _, same = sum_.split()
        assert (
            int(result.rstrip(".")) == int(same) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0
        )


@pytest.mark.parametrize("chat", [False, True])
def test_choices_by_rule_are_scored_after_their_prompts(
    loaded: tuple[Decoder, Tokenizer], chat: bool
) -> None:
    task, scorer = task_named("builtin_copying", chat=chat), scorer_of(loaded)
    items = task.ask(scorer, range(6))
    for item in items:
        question = task.question(item.item_id)
        assert question.prompt in item.prompt
        assert ("<|im_start|>" in item.prompt) == chat
        spoken = [choice.lstrip() if chat else choice for choice in (question.answer, *question.wrong)]
        assert sorted(item.choices) == sorted(spoken)
        assert item.target == spoken[0]
        direct = scorer.logliks([scorer.encode_pair(item.prompt, choice) for choice in item.choices])
        assert item.logliks == pytest.approx([one.loglik for one in direct], abs=1e-4)
        assert item.answer == item.choices[item.logliks.index(max(item.logliks))]
        assert item.correct == (item.answer == item.target)
        assert (item.chance, item.metric, item.scores) == (0.25, "acc", {"acc": float(item.correct)})
    places = {item.choices.index(item.target) for item in task.ask(scorer, range(20))}
    assert places == {0, 1, 2, 3}
    assert task.ask(scorer, [4, 1])[1].doc_digest == items[1].doc_digest != items[4].doc_digest


def test_free_answers_by_rule(loaded: tuple[Decoder, Tokenizer]) -> None:
    """A model that says the right answer to half of them, and ends as the task or the model will."""
    task, tokenizer = task_named("builtin_recital"), loaded[1]
    answers = {}
    for i in range(4):
        question = task.question(i)
        said = question.answer if i % 2 else question.answer[:20]
        said += ".\n" if i < 2 else ""
        answers[tuple(tokenizer.encode(question.prompt))] = [*tokenizer.encode(said), 258]
    scorer = scorer_of(loaded, FakeRunner(384, lambda prompt: answers[tuple(prompt)]))
    items = task.ask(scorer, range(4))
    assert [item.correct for item in items] == [False, True, False, True]
    assert [item.generated.finish for item in items if item.generated] == ["stop", "stop", "eos", "eos"]
    assert items[1].answer == f"{items[1].target}."
    forever = scorer_of(loaded, FakeRunner(384, [65]))
    (item,) = task.ask(forever, [0])
    assert item.generated is not None
    assert item.generated.finish == "length"
    assert item.generated.num_tokens == len(tokenizer.encode(item.target)) + 8
    assert item.generated.repetition > 0.9


def test_broken_logits_are_never_right(loaded: tuple[Decoder, Tokenizer]) -> None:
    """E10: where all choices score NaN the first is no answer, wherever the right one stands."""
    scorer = scorer_of(loaded)
    norm = scorer.engine.runner.decoder.norm
    kept = norm.clone()
    norm.fill_(float("nan"))
    try:
        items = task_named("builtin_copying").ask(scorer, range(12))
    finally:
        norm.copy_(kept)
    assert not any(item.correct for item in items)


def test_builtin_is_all_of_them_cheap_ones_first_and_needs_no_lm_eval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    tasks = load_tasks(["builtin"])
    assert {task.name for task in tasks} == set(tasks_by_rule.NAMES)
    assert [task.kind for task in tasks] == ["choice"] * 3 + ["generation"] * 3
    assert [task.name for task in load_tasks(["builtin_recital", "builtin_copying"])] == [
        "builtin_copying",
        "builtin_recital",
    ]


def test_without_lm_eval_its_tasks_are_refused_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qinfer.evals.tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"arc_easy needs lm-eval: pip install 'qinfer\[eval\]'"):
        load_tasks(["arc_easy"])


def test_rows_become_prompts_as_lm_eval_has_them(tmp_path: Path, loaded: tuple[Decoder, Tokenizer]) -> None:
    choices = write(tmp_path / "one.jsonl", CHOICE, "", {**CHOICE, "query": "Say ", "cluster": "p 1"})
    last = write(tmp_path / "two.jsonl", {"context": "Once upon a ", "continuation": " time"})
    answer = write(tmp_path / "three.jsonl", {"context": "Who?", "answer": "The Sun!"})
    one, two, three = load_tasks([choices, last, answer])
    scorer = scorer_of(loaded)
    first, second = one.ask(scorer, [0, 1])
    assert (first.prompt, first.choices, first.target) == ("Question: which?\nAnswer:", (" a", " b"), " b")
    assert (second.prompt, second.cluster, first.cluster) == ("Say", "p 1", "")
    assert list(first.scores) == ["acc,none", "acc_norm,none"]
    assert (first.metric, first.chance) == ("acc,none", 0.5)
    (item,) = two.ask(scorer, [0])
    assert (item.prompt, item.choices, item.metric) == ("Once upon a", (" time",), "acc,none")
    assert item.scores["perplexity,none"] == item.logliks[0]
    (item,) = three.ask(scorer_of(loaded, FakeRunner(384, [*b" the sun\nand", 258])), [0])
    assert (item.prompt, item.answer) == ("Question: Who?\nAnswer:", " the sun\nand")
    assert item.correct


def test_numbers_are_sought_as_the_examples_give_them(
    tmp_path: Path, loaded: tuple[Decoder, Tokenizer]
) -> None:
    rows = [
        {"context": f"{i} and 1?", "chain_of_thought": f"{i} + 1", "answer": str(i + 1)} for i in range(30)
    ]
    (task,) = load_tasks([write(tmp_path / "sums.jsonl", *rows)])
    assert len(task) == 25
    said = [*b" 3 + 1\n#### 4\nQuestion: 9", 258]
    right, wrong = task.ask(scorer_of(loaded, FakeRunner(384, said)), [3, 4])
    assert right.prompt.startswith("Question: 25 and 1?\nAnswer: 25 + 1\n#### 26\n\nQuestion: 26")
    assert right.prompt.endswith("#### 30\n\nQuestion: 3 and 1?\nAnswer:")
    assert right.answer == " 3 + 1\n#### 4\n"
    assert (right.metric, right.correct, wrong.correct) == ("exact_match,strict-match", True, False)
    loose = task.ask(scorer_of(loaded, FakeRunner(384, [*b" it is $4", 258])), [3])[0]
    assert loose.scores == {"exact_match,strict-match": 0.0, "exact_match,flexible-extract": 1.0}
    (plain,) = load_tasks([write(tmp_path / "plain.jsonl", {"context": "3 and 1?", "answer": "4"})])
    assert plain.ask(scorer_of(loaded, FakeRunner(384, [*b"2, no 4", 258])), [0])[0].correct


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no questions"),
        (["{"], "line 1 is no JSON"),
        ([CHOICE, "[1]"], "line 2 is no JSON object"),
        ([{"question": "?"}], "the rows of .* have question; known forms: choices, gold, query"),
        ([CHOICE, {**CHOICE, "gold": 2}], "line 2: gold must be a choice's number, from 0 to 1, not 2"),
        ([CHOICE, "", {**CHOICE, "gold": "b"}], "line 3: gold must be a choice's number, .* not 'b'"),
        ([{**CHOICE, "choices": ["a"]}], r"line 1: choices must be two or more texts, .* not \['a'\]"),
        ([{**CHOICE, "query": 7}], "line 1: query must be a text, not 7"),
        ([CHOICE, {"text": "a"}], "line 2: choices, gold, query missing; the first row has choices"),
    ],
)
def test_rows_that_are_no_task_are_named_without_lm_eval_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], message: str
) -> None:
    file = write(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(UserError, match=message):
        load_tasks([file])
    monkeypatch.setattr("qinfer.evals.tasks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        load_tasks(["arc_easy", file])


def test_a_row_ends_where_json_lines_end(tmp_path: Path) -> None:
    """A line separator of Unicode is text like any other, raw too."""
    (task,) = load_tasks([write(tmp_path / "rows.jsonl", '{"context": "a\u2028b", "continuation": "c"}')])
    assert isinstance(task, LMEvalTask)
    assert [doc["prompt"] for doc in task.task.eval_docs] == ["a\u2028b"]


def test_a_task_in_yaml(tmp_path: Path, loaded: tuple[Decoder, Tokenizer]) -> None:
    rows = [{"q": f"say {i}", "a": "b"} for i in range(6)]
    write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "mine.yaml").write_text(
        "task: mine\noutput_type: loglikelihood\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}, cache_dir: {tmp_path}}}\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: ' {{a}}'\nmetric_list: [{metric: acc}]\n"
        "num_fewshot: 2\nfewshot_split: test\n"
    )
    (task,) = load_tasks([str(tmp_path / "mine.yaml")])
    scorer = scorer_of(loaded)
    whole = task.ask(scorer, range(6))
    assert [item.prompt.count("say") for item in whole] == [3] * 6  # drawn at random, the same in any portion
    for i in (5, 2):
        (item,) = task.ask(scorer, [i])
        assert item.prompt == whole[i].prompt
    assert load_tasks([str(tmp_path / "mine.yaml")], num_fewshot=0)[0].ask(scorer, [1])[0].prompt == "say 1"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["/nowhere/rows.jsonl"], "there is no task file /nowhere/rows.jsonl"),
        ([], "no task was named"),
        (["builtin", "builtin_copying"], "two tasks are called builtin_copying"),
    ],
)
def test_names_that_mean_nothing(names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tasks(names)


def test_a_name_that_lm_eval_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tasks_lm_eval, "TaskManager", lambda include_defaults: TaskManager(include_defaults=False)
    )
    with pytest.raises(UserError, match="lm-eval knows no task 'no_such_task_at_all'"):
        load_tasks(["no_such_task_at_all"])


def test_tasks_of_lm_evals_own_by_name(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[Decoder, Tokenizer]
) -> None:
    """A tag gives its tasks; their data comes from where lm-eval says, here two rows in its place."""
    asked: list[tuple[str, str]] = []

    def load_dataset(path: str, name: str, **_: Any) -> dict[str, Dataset]:
        asked.append((path, name))
        rows = [
            {
                "question": f"{name} {i}?",
                "answerKey": "AB"[i],
                "choices": {"text": ["p", "q"], "label": ["A", "B"]},
            }
            for i in range(2)
        ]
        return dict.fromkeys(("train", "validation", "test"), Dataset.from_list(rows))

    arc = Path(lm_eval.tasks.__file__).parent / "arc"
    manager = TaskManager(include_defaults=False, include_path=str(arc))
    monkeypatch.setattr(tasks_lm_eval, "TaskManager", lambda include_defaults: manager)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tasks = load_tasks(["ai2_arc"], num_fewshot=1)
    assert {task.name: len(task) for task in tasks} == {"arc_challenge": 2, "arc_easy": 2}
    assert sorted(asked) == [("allenai/ai2_arc", "ARC-Challenge"), ("allenai/ai2_arc", "ARC-Easy")]
    (easy,) = (task for task in tasks if task.name == "arc_easy")
    first, second = easy.ask(scorer_of(loaded), range(2))
    assert first.prompt.endswith("Question: ARC-Easy 0?\nAnswer:")
    assert first.prompt.count("Question:") == 2
    assert (first.choices, first.target, second.target) == ((" p", " q"), " p", " q")
    assert set(first.scores) == {"acc,none", "acc_norm,none"}


def test_tasks_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "rows.jsonl", {"q": "say", "a": "b"})
    (tmp_path / "code.yaml").write_text(
        "task: code\noutput_type: generate_until\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {tmp_path}}}\nunsafe_code: true\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\nmetric_list: [{metric: exact_match}]\n"
    )
    with pytest.raises(UserError, match="code runs programs that the model writes"):
        load_tasks([str(tmp_path / "code.yaml")])
    (tmp_path / "broken.yaml").write_text("task: broken\ndataset_path: json\n")
    with pytest.raises(UserError, match=r"task .*broken\.yaml cannot be loaded"):
        load_tasks([str(tmp_path / "broken.yaml")])
    monkeypatch.setattr(ConfigurableTask, "MULTIMODAL", True, raising=False)
    with pytest.raises(UserError, match="beyond text"):
        load_tasks([write(tmp_path / "seen.jsonl", CHOICE)])


def test_chat_prompts_are_made_for_each_model(tmp_path: Path, loaded: tuple[Decoder, Tokenizer]) -> None:
    (task,) = load_tasks([write(tmp_path / "rows.jsonl", CHOICE)], chat=True)
    assert isinstance(task, LMEvalTask)
    scorer, other = scorer_of(loaded), scorer_of(loaded)
    first = task.ask(scorer, [0])[0].prompt
    assert first == "<|im_start|>user\nQuestion: which?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    hf = loaded[1].hf
    kept, hf.chat_template = hf.chat_template, "{{ messages[0].content }} damaged"
    try:
        assert task.ask(other, [0])[0].prompt == "Question: which?\nAnswer: damaged"
    finally:
        hf.chat_template = kept
