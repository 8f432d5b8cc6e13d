"""lm-eval's tasks, asked a few questions at a time; and its own results of whole tasks.

lm-eval builds the prompts, filters the answers and scores them; only the loop over questions is here, so that
a budget can be spent in portions and a run that stopped goes on. Prompts are built for all questions in
order, as lm-eval does: where examples are drawn at random the draw of question 400 depends on all before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task as LMTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from qinfer.errors import UserError
from qinfer.evals.items import Generated, Item, Kind
from qinfer.evals.lm_model import EngineLM
from qinfer.evals.scorer import Scorer
from qinfer.evals.tasks_jsonl import jsonl_config

_KINDS: Mapping[str, Kind] = {
    "multiple_choice": "choice",
    "loglikelihood": "loglikelihood",
    "loglikelihood_rolling": "rolling",
    "generate_until": "generation",
}
_RESAMPLES = 1000  # of questions, for standard errors
_RIGHT_OR_WRONG = ("acc", "exact_match", "acc_norm", "acc_bytes")  # metrics that are 0 or 1 for a question
_PASSAGES = ("cluster", "passage", "article", "story")  # fields that questions of one cluster share


class LMEvalTask:
    """One task of lm-eval; `chat`: its questions go through the model's chat template."""

    def __init__(self, task: LMTask, *, chat: bool) -> None:
        self.task = task
        self.name: str = task.config.task
        self.kind = _KINDS[task.OUTPUT_TYPE]
        self._chat = chat
        self._docs = task.eval_docs
        self._built: dict[int, list[Instance]] = {}
        self._built_for: Scorer | None = None

    def __len__(self) -> int:
        return len(self._docs)

    def digest(self) -> str:
        """SHA-256 (hex) of its questions and of how they are put."""
        config = _plain(self.task.dump_config())
        return _digest([config, self._chat, [_digest(doc) for doc in self._docs]])

    def ask(self, scorer: Scorer, item_ids: Sequence[int]) -> list[Item]:
        """The model's answers to these questions, in that order."""
        lm = EngineLM(scorer, self.name)
        built = self._instances(scorer, lm)
        asked = {i: [replace(one, resps=[], filtered_resps={}) for one in built[i]] for i in item_ids}
        flat = [one for instances in asked.values() for one in instances]
        generated = _answer(lm, flat)
        self.task._instances = flat
        self.task.apply_filters()
        return [self._item(i, asked[i], generated.get(i)) for i in item_ids]

    def _instances(self, scorer: Scorer, lm: EngineLM) -> Mapping[int, list[Instance]]:
        """The requests of every question; a chat template is the model's own, so they are built for each."""
        if not self._built or (self._chat and self._built_for is not scorer):
            self.task.set_fewshot_seed(DEFAULT_OTHER_SEED)
            self.task.build_all_requests(
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

    def _item(self, item_id: int, instances: list[Instance], generated: Generated | None) -> Item:
        doc = self._docs[item_id]
        instances = sorted(instances, key=lambda one: one.idx)
        scores = self._scores(doc, instances)
        metric = next((name for name in scores if name.split(",")[0] in _RIGHT_OR_WRONG), "")
        if "acc_mutual_info" in self.task._metric_fn_list:
            instances = instances[: len(instances) // 2]  # the rest are the choices without their question
        logliks = _logliks(self.kind, instances)
        prompt, choices = _shown(self.kind, instances)
        broken = not all(math.isfinite(one) for one in logliks)
        return Item(
            task=self.name,
            item_id=item_id,
            kind=self.kind,
            doc_digest=_digest(doc),
            prompt=prompt,
            choices=choices,
            logliks=logliks,
            target=self._target(doc, choices),
            answer=_answer_text(self.kind, instances, choices),
            metric=metric,
            correct=None if not metric else bool(scores[metric]) and not broken,
            scores=scores,
            chance=1 / len(choices) if self.kind == "choice" else 0.0,
            cluster=_cluster(doc),
            generated=generated,
        )

    def _scores(self, doc: Any, instances: list[Instance]) -> dict[str, float]:
        """lm-eval's metrics of one question that are single numbers, by its "metric,filter" names."""
        scores = {}
        for name in instances[0].filtered_resps:
            found = self.task.process_results(doc, [one.filtered_resps[name] for one in instances])
            for metric, value in found.items():
                if isinstance(value, int | float) or hasattr(value, "item"):
                    scores[f"{metric},{name}"] = float(value)
        return scores

    def _target(self, doc: Any, choices: Sequence[str]) -> str:
        target = self.task.doc_to_target(doc)
        by_index = self.kind == "choice" and isinstance(target, int) and 0 <= target < len(choices)
        return choices[target] if by_index else str(target)


def load_lm_eval_tasks(
    names: Sequence[str], *, num_fewshot: int | None = None, chat: bool = False
) -> list[LMEvalTask]:
    """Tasks by name, YAML or JSONL, groups as their members; raises UserError where one cannot be had."""
    by_name = [name for name in names if Path(name).suffix not in (".jsonl", ".yaml", ".yml")]
    manager = TaskManager(include_defaults=bool(by_name))
    found: dict[str, LMTask] = {}
    for name in names:
        spec: Any = jsonl_config(Path(name)) if Path(name).suffix == ".jsonl" else name
        found |= _load(manager, name, spec)
    for task in found.values():
        _set_fewshot(task, num_fewshot)
        if task.OUTPUT_TYPE not in _KINDS:
            raise UserError(
                f"task {task.config.task} asks for {task.OUTPUT_TYPE}, which qinfer has not", "tasks"
            )
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


def _load(manager: TaskManager, name: str, spec: Any) -> dict[str, LMTask]:
    try:
        tasks: dict[str, LMTask] = manager.load([spec])["tasks"]
    except KeyError as error:
        raise UserError(
            f"lm-eval knows no task {name!r}, nor is it a file: {error.args[0]}", "tasks"
        ) from None
    # the hub, its libraries and a task's own code have many ways to fail; the reason is passed on
    except Exception as error:
        raise UserError(f"task {name} cannot be loaded: {type(error).__name__}: {error}", "tasks") from error
    return tasks


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


def _logliks(kind: Kind, instances: Sequence[Instance]) -> tuple[float, ...]:
    if kind == "generation":
        return ()
    responses = [one.resps[0] for one in instances]
    return tuple(float(one[0] if isinstance(one, tuple) else one) for one in responses)


def _shown(kind: Kind, instances: Sequence[Instance]) -> tuple[str, tuple[str, ...]]:
    """The prompt and the choices after it; where prompts differ by choice, what they begin with is one."""
    arguments = [one.args for one in instances]
    if kind == "rolling":
        return "", (str(arguments[0][0]),)
    if kind == "generation":
        return str(arguments[0][0]), ()
    columns = zip(*(context for context, _ in arguments), strict=False)
    prompt = "".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
    return prompt, tuple(context[len(prompt) :] + continuation for context, continuation in arguments)


def _answer_text(kind: Kind, instances: Sequence[Instance], choices: Sequence[str]) -> str:
    """The likeliest choice, a continuation that greedy decoding would say, or the text that was made."""
    if kind == "generation":
        return str(instances[0].resps[0])
    if kind == "choice":
        logliks = _logliks(kind, instances)
        return choices[max(range(len(choices)), key=lambda i: logliks[i])]
    return choices[0] if kind == "loglikelihood" and instances[0].resps[0][1] else ""


def _plain(value: Any) -> Any:
    """A task's configuration with functions by their names, which stay the same from run to run."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _digest(doc: Any) -> str:
    text = json.dumps(doc, sort_keys=True, default=handle_non_serializable, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _cluster(doc: Any) -> str:
    """A name for the passage that the question shares with others; "" where it has none."""
    if not isinstance(doc, Mapping):
        return ""
    passage = next((str(doc[field]) for field in _PASSAGES if doc.get(field)), "")
    return passage if len(passage) <= 64 else hashlib.sha256(passage.encode()).hexdigest()
