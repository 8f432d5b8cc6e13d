"""The engine under lm-eval, against lm-eval's own `hf` model on the same weights: equal item by item."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qinfer.errors import UserError
from qinfer.evals.items import Item
from qinfer.evals.lm_model import EngineLM
from qinfer.evals.scorer import Scorer
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task, load_tasks
from qinfer.evals.tasks_lm_eval import LMEvalTask, lm_eval_results
from qinfer.evidence import Answerer
from qinfer.reading import Reader, Serving, open_model
from qinfer.testing import tiny_model

TEXT = """the sun is hot and water runs down from the hills to the sea on every day of the long dry year"""
WORDS = TEXT.split()


def text(start: int, count: int) -> str:
    return " ".join(WORDS[(start + 7 * i) % len(WORDS)] for i in range(count))


ROWS: dict[str, list[dict[str, Any]]] = {
    "choices": [
        {
            "query": f"Question: {text(i, 2 + i % 5)}?\n",
            "choices": [text(i + j, 1 + (i + j) % 4) for j in range(2 + i % 3)],
            "gold": i % 2,
        }
        for i in range(12)
    ],
    "last_word": [{"context": text(i, 3 + 2 * i), "continuation": WORDS[i]} for i in range(8)],
    "free": [{"context": text(i, 1 + 3 * i), "answer": WORDS[i]} for i in range(8)],
    "pages": [{"text": text(i, 90 * i + 1)} for i in range(4)],  # up to three windows and a bit
}


@pytest.fixture(scope="module")
def task_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [str(folder / f"{name}.jsonl") for name in ROWS]


def change_generation_config(folder: Path, **changes: float) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module", params=["byte-level", "with BOS"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sentencepiece_folder: Path
) -> Path:
    made = tiny_model("llama3", tmp_path_factory.mktemp("model"), seed=3, max_position_embeddings=512)
    if request.param == "with BOS":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(sentencepiece_folder / name, made)
        config = json.loads((made / "generation_config.json").read_text())
        (made / "generation_config.json").write_text(
            json.dumps({**config, "eos_token_id": 2, "pad_token_id": 2})
        )
    return made


def scorer_of(folder: Path) -> Scorer:
    model = open_model(str(folder))
    serving = Serving.settle("float32", "auto", model.checkpoint)
    return Answerer(Reader(model, serving, 1), Store(folder / "answers"), progress=False).scorer()


def hf_of(folder: Path) -> HFLM:
    return HFLM(pretrained=str(folder), dtype="float32", batch_size=3, device="cpu")


def check_items(task: LMEvalTask, items: list[Item], samples: list[dict[str, Any]]) -> None:
    """Every answer, and every metric that lm-eval makes of it under any filter, is hf's."""
    assert len(items) == len(task)
    for item in items:
        theirs = [one for one in samples if one["doc_id"] == item.item_id]
        responses = [one[0] for one in theirs[0]["resps"]]
        first = theirs[0]["arguments"][0]
        shown = "".join(first if item.kind in ("choice", "loglikelihood") else first[:1])
        assert item.prompt + "".join(item.choices[:1]) == shown
        if item.kind == "generation":
            assert [item.answer] == responses
        else:
            logliks = [one[0] if isinstance(one, tuple) else one for one in responses]
            assert item.logliks == pytest.approx(logliks, abs=2e-3 if item.kind == "rolling" else 1e-4)
        for name, value in item.scores.items():
            metric, used = name.split(",")
            (same,) = (one for one in theirs if one["filter"] == used)
            assert value == pytest.approx(float(same[metric]), abs=1e-4)


def shortened(tasks: Sequence[Task]) -> list[LMEvalTask]:
    """The same tasks; free answers of 16 tokens at most."""
    found = [task for task in tasks if isinstance(task, LMEvalTask)]
    for task in found:
        if task.kind == "generation":
            task.task.set_config("generation_kwargs", {"max_gen_toks": 16}, update=True)
    return found


@pytest.mark.parametrize("chat", [False, True])
def test_every_item_is_what_hf_says(folder: Path, task_files: list[str], chat: bool) -> None:
    hf, scorer = hf_of(folder), scorer_of(folder)
    tasks = load_tasks(task_files, chat=chat)
    assert {task.name: task.kind for task in tasks} == {
        "choices": "choice",
        "last_word": "loglikelihood",
        "pages": "rolling",
        "free": "generation",
    }
    theirs = lm_eval_results(hf, shortened(tasks), chat=chat)
    for task in tasks:
        assert isinstance(task, LMEvalTask)
        items = task.ask(scorer, range(len(task)))
        check_items(task, items, theirs["samples"][task.name])
        backwards = task.ask(scorer, [5, 2] if len(task) > 5 else [1, 0])
        assert [one.item_id for one in backwards] == ([5, 2] if len(task) > 5 else [1, 0])
        for one in backwards:
            assert one.prompt == items[one.item_id].prompt
            assert one.answer == items[one.item_id].answer
            assert one.logliks == pytest.approx(items[one.item_id].logliks, abs=1e-3)


def test_whole_results_are_lm_evals(folder: Path, task_files: list[str]) -> None:
    tasks = shortened(load_tasks(task_files))
    theirs = lm_eval_results(hf_of(folder), tasks, limit=4)
    ours = lm_eval_results(EngineLM(scorer_of(folder), "tiny"), tasks, limit=4)
    assert ours["results"].keys() == theirs["results"].keys() == ROWS.keys()
    for name, numbers in theirs["results"].items():
        for key, value in numbers.items():
            if isinstance(value, float):
                assert ours["results"][name][key] == pytest.approx(value, rel=1e-3), (name, key)
            else:
                assert ours["results"][name][key] == value
    assert ours["n-samples"] == theirs["n-samples"]
    assert ours["n-samples"]["choices"] == {"original": 12, "effective": 4}


def request(kind: Any, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0, ("task", 0, 1))


@pytest.fixture(scope="module")
def lm(byte_level_folder: Path) -> EngineLM:
    return EngineLM(scorer_of(byte_level_folder), "tiny/model")


def test_generation_takes_what_tasks_ask_for(lm: EngineLM) -> None:
    """Aliases of max_gen_toks, a stop string alone or in a list, and sampling by seed."""
    whole = lm.generate_until([request("generate_until", "the sun", {"max_new_tokens": 12})])[0]
    stop = whole[3:5]
    for until in (stop, [stop, ""]):
        asked = {"max_gen_toks": 12, "until": until}
        assert lm.generate_until([request("generate_until", "the sun", asked)]) == [whole.split(stop)[0]]
    sampled = {"do_sample": True, "temperature": 1.5, "seed": 4, "top_k": 50, "max_tokens": 12}
    first, second = (lm.generate_until([request("generate_until", "the sun", sampled)]) for _ in range(2))
    assert first == second != [whole]
    with pytest.raises(UserError, match="num_beams"):
        lm.generate_until([request("generate_until", "the sun", {"num_beams": 4})])


def test_a_penalty_of_the_model_holds_where_a_task_says_nothing(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model", seed=3)
    change_generation_config(folder, repetition_penalty=1.7)
    asked = {"max_gen_toks": 40}
    requests = [request("generate_until", text(i, 4), asked) for i in range(3)]
    ours = EngineLM(scorer_of(folder), "tiny").generate_until(requests)
    assert ours == hf_of(folder).generate_until(requests)
    plain = [request("generate_until", text(i, 4), {**asked, "repetition_penalty": 1.0}) for i in range(3)]
    assert EngineLM(scorer_of(folder), "tiny").generate_until(plain) != ours


def test_a_template_that_refuses_system_messages_is_asked_without(
    lm: EngineLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    monkeypatch.setattr(lm.tokenizer, "chat_template", template + "<{{ m.content }}>{% endfor %}")
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert lm.apply_chat_template(turns) == "<b>"
    assert "no system" in caplog.text
    monkeypatch.setattr(lm.tokenizer, "chat_template", "{{ raise_exception('nothing goes') }}")
    with pytest.raises(UserError, match="nothing goes"):
        lm.apply_chat_template(turns[1:])


def test_the_interface_that_lm_eval_knows(lm: EngineLM) -> None:
    assert (lm.eot_token_id, lm.prefix_token_id, lm.max_length) == (258, 256, 256)
    assert lm.tokenizer_name == "tiny__model"
    assert lm.tok_encode("AB") == lm.tok_encode("AB", add_special_tokens=False) == [65, 66]
    assert "im_start" in (lm.chat_template(True) or "")
    (pair,) = lm.loglikelihood([request("loglikelihood", "A", "B")])
    assert isinstance(pair[0], float)
    assert isinstance(pair[1], bool)
