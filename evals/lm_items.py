"""From lm-eval's way of telling an answered question to a record: see `items`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task as LMTask
from lm_eval.utils import handle_non_serializable

from qinfer.evals.items import Generated, Item, Kind

KINDS: Mapping[str, Kind] = {
    "multiple_choice": "choice",
    "loglikelihood": "loglikelihood",
    "loglikelihood_rolling": "rolling",
    "generate_until": "generation",
}
_RIGHT_OR_WRONG = ("acc", "exact_match", "acc_norm", "acc_bytes")  # metrics that are 0 or 1 for a question
_PASSAGES = ("cluster", "passage", "article", "story")  # fields that questions of one cluster share


def item_of(task: LMTask, doc: Any, instances: list[Instance], generated: Generated | None) -> Item:
    """The record of a question that has been answered: its instances have their filtered responses."""
    kind = KINDS[task.OUTPUT_TYPE]
    instances = sorted(instances, key=lambda one: one.idx)
    scores = _scores(task, doc, instances)
    metric = next((name for name in scores if name.split(",")[0] in _RIGHT_OR_WRONG), "")
    if "acc_mutual_info" in task._metric_fn_list:
        instances = instances[: len(instances) // 2]  # the rest are the choices without their question
    logliks = _logliks(kind, instances)
    prompt, choices = _shown(kind, instances)
    broken = not all(math.isfinite(one) for one in logliks)
    return Item(
        task=task.config.task,
        item_id=instances[0].doc_id,
        kind=kind,
        doc_digest=digest_of(doc),
        prompt=prompt,
        choices=choices,
        logliks=logliks,
        target=_target(task, doc, choices),
        answer=_answer_text(kind, instances, choices),
        metric=metric,
        correct=None if not metric else bool(scores[metric]) and not broken,
        scores=scores,
        chance=1 / len(choices) if kind == "choice" else 0.0,
        cluster=_cluster(doc),
        generated=generated,
    )


def plain(value: Any) -> Any:
    """A task's configuration with functions by their names, which stay the same from run to run."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def digest_of(doc: Any) -> str:
    """SHA-256 (hex) of a question's data, whatever the order of its fields."""
    text = json.dumps(doc, sort_keys=True, default=handle_non_serializable, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _scores(task: LMTask, doc: Any, instances: list[Instance]) -> dict[str, float]:
    """lm-eval's metrics of one question that are single numbers, by its "metric,filter" names."""
    scores = {}
    for name in instances[0].filtered_resps:
        found = task.process_results(doc, [one.filtered_resps[name] for one in instances])
        for metric, value in found.items():
            if isinstance(value, int | float) or hasattr(value, "item"):
                scores[f"{metric},{name}"] = float(value)
    return scores


def _target(task: LMTask, doc: Any, choices: Sequence[str]) -> str:
    target, kind = task.doc_to_target(doc), KINDS[task.OUTPUT_TYPE]
    by_index = kind == "choice" and isinstance(target, int) and 0 <= target < len(choices)
    return choices[target] if by_index else str(target)


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


def _cluster(doc: Any) -> str:
    """A name for the passage that the question shares with others; "" where it has none."""
    if not isinstance(doc, Mapping):
        return ""
    passage = next((str(doc[field]) for field in _PASSAGES if doc.get(field)), "")
    return passage if len(passage) <= 64 else hashlib.sha256(passage.encode()).hexdigest()
