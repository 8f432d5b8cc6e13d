"""What is asked of a model: tasks by name, each a row of questions that can be asked a few at a time.

A name is one of:

    builtin              the tasks that are made by rule (`tasks_by_rule`): they need nothing but qinfer
    builtin_copying ...  one of them
    PATH.jsonl           rows of your own, see `tasks_jsonl`; offline
    PATH.yaml            a task of lm-eval's own form
    arc_easy ...         a task, group or tag of lm-eval, whose data comes from the hub

All but the built-in ones need lm-eval, the extra `eval`. Question i of a task is the same whoever asks it, in
whatever portions: what was asked before need not be asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qinfer.errors import UserError
from qinfer.evals import tasks_by_rule
from qinfer.evals.items import Item, Kind
from qinfer.evals.scorer import Scorer
from qinfer.evals.tasks_jsonl import read_rows

if TYPE_CHECKING:
    from qinfer.evals.tasks_lm_eval import LMEvalTask

BUILTIN = "builtin"


class Task(Protocol):
    """A named row of questions."""

    @property
    def name(self) -> str:
        """As it stands in records and reports."""
        ...

    @property
    def kind(self) -> Kind:
        """What one question asks; a "generation" costs as much as a hundred others."""
        ...

    def __len__(self) -> int:
        """Questions that it has."""
        ...

    def digest(self) -> str:
        """SHA-256 (hex) of its questions and of how they are put: with another, answers are others."""
        ...

    def ask(self, scorer: Scorer, item_ids: Sequence[int]) -> list[Item]:
        """The model's answers to these questions, in that order."""
        ...


def load_tasks(names: Sequence[str], *, num_fewshot: int | None = None, chat: bool = False) -> list[Task]:
    """The tasks of these names, cheap ones first; groups give several.

    `num_fewshot` examples stand before each question of tasks that have some, None: as the task says. `chat`:
    questions go through the model's chat template. Raises UserError for a name that means nothing, a file
    that cannot be read, lm-eval missing, or data that the hub does not give.
    """
    own: list[Task] = []
    others: list[str] = []
    for name in names:
        if name == BUILTIN or name in tasks_by_rule.NAMES:
            wanted = tasks_by_rule.NAMES if name == BUILTIN else (name,)
            own += [tasks_by_rule.task_named(one, chat=chat) for one in wanted]
        else:
            others.append(name)
    found = [*own, *_from_lm_eval(others, num_fewshot, chat)]
    names_found = [task.name for task in found]
    twice = {name for name in names_found if names_found.count(name) > 1}
    if twice:
        raise UserError(f"two tasks are called {min(twice)}: give one, or rename its file", "tasks")
    if not found:
        raise UserError(f"no task was named; the built-in ones are called {BUILTIN}", "tasks")
    return sorted(found, key=lambda task: task.kind == "generation")


def check_files(names: Sequence[str]) -> None:
    """UserError for a task file that is not there, and for the line of a JSONL that is no question.

    Needs neither lm-eval nor a model: it is known before either is asked for.
    """
    for name in names:
        suffix = Path(name).suffix
        if suffix in (".jsonl", ".yaml", ".yml") and not Path(name).is_file():
            raise UserError(f"there is no task file {name}", "tasks")
        if suffix == ".jsonl":
            read_rows(Path(name))


def _from_lm_eval(names: Sequence[str], num_fewshot: int | None, chat: bool) -> list[LMEvalTask]:
    if not names:
        return []
    check_files(names)
    if find_spec("lm_eval") is None:
        raise UserError(
            f"task {names[0]} needs lm-eval: pip install 'qinfer[eval]', or ask the tasks called {BUILTIN}",
            "tasks",
        )
    from qinfer.evals.tasks_lm_eval import load_lm_eval_tasks

    return load_lm_eval_tasks(names, num_fewshot=num_fewshot, chat=chat)
