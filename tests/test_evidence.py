"""Both models are asked once: what was read or answered is kept by hash, and a stopped run goes on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from qinfer.engine.engine import Engine
from qinfer.evals.items import Item
from qinfer.evals.scorer import Scorer
from qinfer.evals.store import Store
from qinfer.evals.tasks import Task, load_tasks
from qinfer.evidence import BLOCK, Answerer, blocks_of
from qinfer.reading import Bar, OpenModel, Reader, Serving, open_model, scores_of
from qinfer.testing import tiny_model

BAR = Bar(shown=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("evidence") / "tiny", dtype="bfloat16")


@pytest.fixture
def model(folder: Path) -> OpenModel:
    return open_model(str(folder))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that is made."""
    made: list[Engine] = []
    original = Engine.__init__

    def remember(engine: Engine, *args: object, **kwargs: object) -> None:
        made.append(engine)
        original(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "__init__", remember)
    return made


def reader(model: OpenModel, store: Store | None = None, dtype: str = "float32") -> Reader:
    return Reader(model, Serving.settle(dtype, "auto", model.checkpoint), 64, store)


def windows(count: int) -> list[list[int]]:
    return torch.randint(256, (count, 40), generator=torch.Generator().manual_seed(3)).tolist()


def test_logits_of_kept_hidden_states_are_those_of_the_engine_to_the_last_bit(
    model: OpenModel, store: Store, engines: list[Engine]
) -> None:
    (ids,) = windows(1)
    direct = torch.cat(list(reader(model).logits(ids)))
    first = torch.cat(list(reader(model, store).logits(ids)))
    assert len(engines) == 2
    again = torch.cat(list(reader(model, store).logits(ids)))
    assert len(engines) == 2  # only the head was loaded
    assert torch.equal(direct, first)
    assert torch.equal(direct, again)


def test_whatever_decides_the_numbers_is_another_reader(
    model: OpenModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reader(model)
    assert plain.identity == reader(open_model(str(folder))).identity
    others = [reader(model, dtype="bfloat16").identity]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert reader(open_model(str(copy))).identity == plain.identity  # where it lies is not what it is
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    others.append(reader(open_model(str(copy))).identity)
    monkeypatch.setattr("qinfer.reading.code_digest", lambda: "other code")
    others.append(reader(model).identity)
    assert len({plain.identity, *others}) == 4


def test_windows_that_were_scored_are_not_scored_again(
    model: OpenModel, store: Store, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Engine.prompt_logits

    def counted(engine: Engine, ids: Sequence[int], **options: object) -> object:
        read.append(len(read))
        if len(read) == 3:
            raise KeyboardInterrupt
        return original(engine, ids, **options)

    monkeypatch.setattr(Engine, "prompt_logits", counted)
    texts = windows(5)

    def run() -> list[float]:
        pair = reader(model, store), reader(model, dtype="bfloat16")
        return [float(scores.kl.sum()) for scores in scores_of(*pair, texts, store, BAR)]

    with pytest.raises(KeyboardInterrupt):
        run()
    whole = run()
    assert len(read) == 3 + 3  # two were kept
    assert len(engines) == 2 + 1  # the source was not loaded again
    assert run() == whole
    assert len(read) == 6
    assert len(engines) == 3
    assert all(kl > 0 for kl in whole)


def test_no_two_models_are_in_memory_at_once(
    model: OpenModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, candidate = reader(model, store), reader(model, dtype="bfloat16")
    original = Engine.prompt_logits

    def checked(engine: Engine, ids: Sequence[int], **options: object) -> object:
        assert source._engine is None
        return original(engine, ids, **options)

    monkeypatch.setattr(Engine, "prompt_logits", checked)
    assert len(scores_of(source, candidate, windows(2), store, BAR)) == 2


def tasks() -> list[Task]:
    return load_tasks(["builtin_copying", "builtin_retrieval", "builtin_counting"])


def test_blocks_of_all_tasks_take_turns_in_proportion() -> None:
    blocks = blocks_of(tasks())
    asked = [(block.task.name, i) for block in blocks for i in block.item_ids]
    assert len(asked) == len(set(asked)) == 400 + 400 + 24
    half = asked[: len(asked) // 2]
    for name, size in (("builtin_copying", 400), ("builtin_retrieval", 400), ("builtin_counting", 24)):
        of_task = [i for task, i in half if task == name]
        assert abs(len(of_task) - size / 2) <= BLOCK
        assert of_task == list(range(len(of_task)))
    limited = blocks_of(tasks(), 20)
    assert sum(len(block.item_ids) for block in limited) == 60


def test_questions_that_were_answered_are_not_asked_again(
    model: OpenModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = Scorer.logliks

    def counted(scorer: Scorer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> object:
        asked.append(len(pairs))
        return original(scorer, pairs)

    monkeypatch.setattr(Scorer, "logliks", counted)
    blocks = blocks_of(load_tasks(["builtin_copying"]), 40)

    def answers(part: slice, dtype: str = "float32") -> list[Item]:
        return Answerer(reader(model, dtype=dtype), store, progress=False).answers(blocks[part])

    first = answers(slice(0, 1))
    assert asked == [4 * BLOCK]
    whole = answers(slice(None))
    assert asked == [4 * BLOCK, 4 * 24]
    assert whole[:BLOCK] == first
    assert [item.item_id for item in whole] == list(range(40))
    assert answers(slice(None)) == whole
    assert len(asked) == 2
    other = answers(slice(None), dtype="bfloat16")  # run otherwise: another answerer
    assert len(asked) == 3
    assert [item.doc_digest for item in other] == [item.doc_digest for item in whole]
