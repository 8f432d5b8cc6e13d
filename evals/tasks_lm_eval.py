"""lm-eval's tasks, asked a few questions at a time; and its own results of whole tasks.

lm-eval builds the prompts, filters the answers and scores them; only the loop over questions is here, so that
a budget can be spent in portions and a run that stopped goes on. Prompts are built in order from the first
question on, as lm-eval does: where examples are drawn at random each draw depends on all before it.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task as LMTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from qinfer.errors import UserError
from qinfer.evals.items import Generated, Item
from qinfer.evals.lm_items import KINDS, digest_of, item_of, plain
from qinfer.evals.lm_model import EngineLM
from qinfer.evals.scorer import Scorer
from qinfer.evals.tasks_jsonl import jsonl_config

_RESAMPLES = 1000  # of questions, for standard errors


class LMEvalTask:
    """One task of lm-eval; `chat`: its questions go through the model's chat template."""

    def __init__(self, task: LMTask, *, chat: bool) -> None:
        self.task = task
        self.name: str = task.config.task
        self.kind = KINDS[task.OUTPUT_TYPE]
        self._chat = chat
        self._docs = task.eval_docs
        self._built: dict[int, list[Instance]] = {}
        self._built_for: Scorer | None = None

    def __len__(self) -> int:
        return len(self._docs)

    def digest(self) -> str:
        """SHA-256 (hex) of its questions and of how they are put."""
        config = plain(self.task.dump_config())
        return digest_of([config, self._chat, [digest_of(doc) for doc in self._docs]])

    def ask(self, scorer: Scorer, item_ids: Sequence[int]) -> list[Item]:
        """The model's answers to these questions, in that order."""
        lm = EngineLM(scorer, self.name)
        built = self._instances(scorer, lm, max(item_ids) + 1)
        asked = {i: [replace(one, resps=[], filtered_resps={}) for one in built[i]] for i in item_ids}
        flat = [one for instances in asked.values() for one in instances]
        generated = _answer(lm, flat)
        self.task._instances = flat
        self.task.apply_filters()
        return [item_of(self.task, self._docs[i], asked[i], generated.get(i)) for i in item_ids]

    def _instances(self, scorer: Scorer, lm: EngineLM, count: int) -> Mapping[int, list[Instance]]:
        """Requests of the first `count` questions at least; a chat template is the model's own."""
        if len(self._built) < count or (self._chat and self._built_for is not scorer):
            self.task.set_fewshot_seed(DEFAULT_OTHER_SEED)
            self.task.build_all_requests(
                limit=min(len(self), max(count, 2 * len(self._built))),
                apply_chat_template=self._chat,
                fewshot_as_multiturn=self._chat,
                chat_template=lm.apply_chat_template if self._chat else None,
                tokenizer_name=lm.tokenizer_name if self._chat else "",
            )
            self._built = defaultdict(list)
            for instance in self.task.instances:
                self._built[instance.doc_id].append(instance)
            self._built_for = scorer
        return self._built


def load_lm_eval_tasks(
    names: Sequence[str], *, num_fewshot: int | None = None, chat: bool = False
) -> list[LMEvalTask]:
    """Tasks by name, YAML or JSONL, groups as their members; raises UserError where one cannot be had."""
    by_name = [name for name in names if Path(name).suffix not in (".jsonl", ".yaml", ".yml")]
    manager = TaskManager(include_defaults=bool(by_name))
    found: dict[str, LMTask] = {}
    for name in names:
        if Path(name).suffix == ".jsonl":
            with _without_warnings():
                found |= _load(manager, name, jsonl_config(Path(name)))
        else:
            found |= _load(manager, name, name)
    for task in found.values():
        _check(task)
        _set_fewshot(task, num_fewshot)
    return [LMEvalTask(task, chat=chat) for task in found.values()]


def lm_eval_results(
    lm: LM, tasks: Sequence[LMEvalTask], *, limit: int | None = None, chat: bool = False
) -> dict[str, Any]:
    """What lm-eval itself reports of tasks put to one of its models: "results", "samples" and more.

    `limit`: only the first questions of each. Standard errors that have no formula are bootstrapped.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork, beside torch's threads
    for task in tasks:
        task.task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    results: dict[str, Any] = evaluate(
        lm,
        {"tasks": {task.name: task.task for task in tasks}},
        limit=limit,
        bootstrap_iters=_RESAMPLES,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    return results


@contextmanager
def _without_warnings() -> Iterator[None]:
    """lm-eval warns of every task whose data is given in memory."""
    log = logging.getLogger("lm_eval.api.task")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _load(manager: TaskManager, name: str, spec: Any) -> dict[str, LMTask]:
    if isinstance(spec, str) and spec not in manager.task_index and not Path(spec).is_file():
        close = get_close_matches(name, manager.all_tasks, 3)
        hint = f"; close to it are {', '.join(close)}" if close else ""
        raise UserError(f"lm-eval knows no task {name!r}, nor is it a file{hint}", "tasks")
    try:
        tasks: dict[str, LMTask] = manager.load([spec])["tasks"]
    # the hub, its libraries and a task's own code have many ways to fail; the reason is passed on
    except Exception as error:
        raise UserError(f"task {name} cannot be loaded: {type(error).__name__}: {error}", "tasks") from error
    return tasks


def _check(task: LMTask) -> None:
    """UserError for a task that asks for more than text, or to run what the model writes."""
    name = task.config.task
    if task.OUTPUT_TYPE not in KINDS or getattr(task, "MULTIMODAL", False):
        raise UserError(
            f"task {name} asks for {task.OUTPUT_TYPE} beyond text, which qinfer does not have", "tasks"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"task {name} runs programs that the model writes, which qinfer does not do", "tasks")


def _set_fewshot(task: LMTask, num_fewshot: int | None) -> None:
    """As lm-eval: a task that says 0 keeps it, one that says nothing has none unless asked."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


def _answer(lm: EngineLM, instances: Sequence[Instance]) -> dict[int, Generated]:
    """Fills in the responses; says of generations, by question, how they came out."""
    by_type: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances:
        by_type[instance.request_type] += [instance] * (instance.repeats or 1)
    generated: dict[int, Generated] = {}
    for kind, requests in by_type.items():
        if kind == "generate_until":
            said = lm.say(requests)
            for request, (_, how) in zip(requests, said, strict=True):
                generated.setdefault(request.doc_id, how)
            answers: Sequence[Any] = [text for text, _ in said]
        else:
            ask: Callable[[list[Instance]], Sequence[Any]] = getattr(lm, kind)
            answers = ask(requests)
        for request, answer in zip(requests, answers, strict=True):
            request.resps.append(answer)
    return generated
