"""Rows of JSON as a task for lm-eval: one question a line, in one of four forms, told by its keys.

    {"query": text, "choices": [texts], "gold": index}         which choice is likeliest
    {"context": text, "continuation": text}                    would greedy decoding say just that
    {"context": text, "answer": text}                          a free answer, compared with this one
    {"text": text}                                             perplexity

A query or context that begins with "Question:" is followed by "Answer:" on a line of its own, as in
lm-eval's tasks of these forms; choices and continuations follow a space. Where rows of the third form have a
"chain_of_thought", the last five of them are examples that stand before every question, and are not asked.
An answer that is a number is sought in what the model says: after "####" as in the examples (strict-match),
or as the last number (flexible-extract); any other must be its first line. "cluster" names rows that share a
passage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qinfer.errors import UserError

Row = dict[str, Any]

_FORMS: Mapping[str, frozenset[str]] = {
    "multiple_choice": frozenset({"query", "choices", "gold"}),
    "loglikelihood": frozenset({"context", "continuation"}),
    "generate_until": frozenset({"context", "answer"}),
    "loglikelihood_rolling": frozenset({"text"}),
}
_NUMBER = re.compile(r"-?[$\d][\d,]*(\.\d+)?")
_SHOTS = 5
_MAX_TOKENS = 256


def jsonl_config(path: Path) -> dict[str, Any]:
    """The task of a file, as lm-eval takes one in line; raises UserError naming the line that is wrong."""
    form, rows = read_rows(path)
    docs = [_DOC[form](row) for row in rows]
    return {
        "task": path.stem,
        "output_type": form,
        "test_split": "test",
        "doc_to_text": "prompt",
        "metadata": {"version": 1.0},
        **_SETTINGS[form](rows, docs),
    }


def _dataset(docs: Sequence[Row]) -> Callable[..., dict[str, Any]]:
    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(list(docs))}

    return load


def read_rows(path: Path) -> tuple[str, list[Row]]:
    """The form of a file's questions and the questions; UserError naming the first line that is none."""
    numbered = _objects(path)
    if not numbered:
        raise UserError(f"the task {path} has no questions", "tasks")
    first = next(iter(numbered.values()))
    form = next((form for form, keys in _FORMS.items() if keys <= first.keys()), None)
    if form is None:
        known = "; ".join(", ".join(sorted(keys)) for keys in _FORMS.values())
        raise UserError(f"the rows of {path} have {', '.join(first)}; known forms: {known}", "tasks")
    for number, row in numbered.items():
        if fault := _fault(row, form):
            raise UserError(f"{path}, line {number}: {fault}", "tasks")
    return form, list(numbered.values())


def _objects(path: Path) -> dict[int, Row]:
    """The JSON objects of a file by line, from 1 on; lines without anything are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # text in a row may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the task {path} cannot be read: {error}", "tasks") from None
    rows = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError as error:
            raise UserError(f"{path}, line {number} is no JSON: {error}", "tasks") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is no JSON object", "tasks")
        if row:
            rows[number] = row
    return rows


def _fault(row: Row, form: str) -> str | None:
    """What keeps a row from being a question of this form, the first row's."""
    if missing := sorted(_FORMS[form] - row.keys()):
        return f"{', '.join(missing)} missing; the first row has {', '.join(sorted(_FORMS[form]))}"
    for key in sorted(_FORMS[form] - {"choices", "gold"}):
        if not isinstance(row[key], str):
            return f"{key} must be a text, not {row[key]!r:.100}"
    if form != "multiple_choice":
        return None
    choices, gold = row["choices"], row["gold"]
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not texts or len(choices) < 2:
        return f"choices must be two or more texts, none empty, not {choices!r:.100}"
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        return f"gold must be a choice's number, from 0 to {len(choices) - 1}, not {gold!r:.100}"
    return None


def _prompt(text: str) -> str:
    asks = text.lstrip().startswith("Question:") and "Answer:" not in text
    return f"{text.rstrip()}\nAnswer:" if asks else text.rstrip()


def _common(row: Row, key: str) -> Row:
    return {"prompt": _prompt(row[key]), "cluster": str(row.get("cluster", ""))}


def _answer_doc(row: Row) -> Row:
    question = row["context"].strip()
    asked = question if question.startswith("Question:") else f"Question: {question}"
    thought = row.get("chain_of_thought")
    said = f"{thought}\n#### {row['answer']}" if thought else row["answer"]
    return {**_common({**row, "context": asked}, "context"), "answer": said}


_DOC: Mapping[str, Callable[[Row], Row]] = {
    "multiple_choice": lambda row: {**_common(row, "query"), "choices": row["choices"], "gold": row["gold"]},
    "loglikelihood": lambda row: {**_common(row, "context"), "target": f" {row['continuation'].strip()}"},
    "generate_until": _answer_doc,
    "loglikelihood_rolling": lambda row: {"prompt": "", "text": row["text"]},
}


def _choice_settings(rows: Sequence[Row], docs: Sequence[Row]) -> Row:
    return {
        "custom_dataset": _dataset(docs),
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [_metric("acc"), _metric("acc_norm")],
    }


def _continuation_settings(rows: Sequence[Row], docs: Sequence[Row]) -> Row:
    return {
        "custom_dataset": _dataset(docs),
        "doc_to_target": "target",
        "target_delimiter": "",
        "metric_list": [_metric("acc"), _metric("perplexity", "perplexity")],
    }


def _answer_settings(rows: Sequence[Row], docs: Sequence[Row]) -> Row:
    numbers = all(_NUMBER.fullmatch(row["answer"].strip()) for row in rows)
    examples = [doc for row, doc in zip(rows, docs, strict=True) if row.get("chain_of_thought")][-_SHOTS:]
    examples = examples if len(rows) > 4 * _SHOTS else []
    return {
        "custom_dataset": _dataset([doc for doc in docs if doc not in examples]),
        "doc_to_target": "answer",
        "num_fewshot": len(examples),
        "fewshot_config": {"sampler": "first_n", "samples": examples},
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": _MAX_TOKENS, "do_sample": False},
        "metric_list": [_number_match() if numbers else _text_match()],
        "filter_list": _number_filters(strictly=bool(examples)) if numbers else [_FIRST_LINE],
    }


def _text_settings(rows: Sequence[Row], docs: Sequence[Row]) -> Row:
    ratios = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity"}
    ratios |= {"bits_per_byte": "bits_per_byte"}
    return {
        "custom_dataset": _dataset(docs),
        "doc_to_target": "text",
        "metric_list": [_metric(name, aggregation) for name, aggregation in ratios.items()],
    }


_SETTINGS: Mapping[str, Callable[[Sequence[Row], Sequence[Row]], Row]] = {
    "multiple_choice": _choice_settings,
    "loglikelihood": _continuation_settings,
    "generate_until": _answer_settings,
    "loglikelihood_rolling": _text_settings,
}
_FIRST_LINE = {
    "name": "first-line",
    "filter": [
        {"function": "regex", "regex_pattern": r"^\s*([^\n]*)", "fallback": ""},
        {"function": "take_first"},
    ],
}


def _metric(name: str, aggregation: str = "mean") -> Row:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}


def _text_match() -> Row:
    return {**_metric("exact_match"), "ignore_case": True, "ignore_punctuation": True}


def _number_match() -> Row:
    """Compares numbers: what stands before "####", dollars and commas do not count."""
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
    return {**_metric("exact_match"), "ignore_case": True, "regexes_to_ignore": ignored}


def _number_filters(*, strictly: bool) -> list[Row]:
    strict = {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}
    last = {"function": "regex", "group_select": -1, "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"}
    first = {"function": "take_first"}
    flexible = {"name": "flexible-extract", "filter": [last, first]}
    return [{"name": "strict-match", "filter": [strict, first]}, flexible] if strictly else [flexible]
