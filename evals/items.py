"""One answered question of one task: what a model was shown, what it answered, and whether that was right.

Statistics, report and certificate read these records and nothing else of a task, so that they need neither
lm-eval nor an engine. Two models are compared question by question: `pair` matches the records of a source
and a candidate and refuses to match what is not the same question. Whether both were *shown* the same is
another matter: a chat template belongs to the model, and a damaged one shows in `prompt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qinfer.errors import UserError

Kind = Literal["choice", "loglikelihood", "rolling", "generation"]


@dataclass(frozen=True)
class Generated:
    """How a free answer came out; rates of these are compared with the source's."""

    num_tokens: int  # generated, the end token included
    # the model's own end, a stop string of the task, cut off, or logits that are no numbers
    finish: Literal["eos", "stop", "length", "error"]
    repetition: float  # share of its 4-grams of tokens that had occurred in it before, 0 to 1


@dataclass(frozen=True)
class Item:
    """One question of a task with one model's answer."""

    task: str
    item_id: int  # position in the task's data, the same for every model
    kind: Kind
    doc_digest: str  # SHA-256 of the question's data: only equal ones are paired
    prompt: str  # as the model saw it, chat template included
    choices: tuple[str, ...]  # continuations that were scored; () for a generation
    logliks: tuple[float, ...]  # nats, one per choice; () for a generation
    target: str  # the right answer
    answer: str  # the model's: the likeliest choice, or the text it made
    metric: str  # what `correct` says: "acc", "acc_norm", "exact_match", ...
    correct: bool | None  # None where the metric is not right-or-wrong (perplexity)
    scores: Mapping[str, float]  # every metric of lm-eval for this item that is one number
    chance: float = 0.0  # the share that blind guessing gets right: 1 / choices
    cluster: str = ""  # items that share a passage share a name; "": on its own
    generated: Generated | None = field(default=None)

    @property
    def key(self) -> tuple[str, int]:
        """What pairs it with the same question put to another model."""
        return (self.task, self.item_id)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Item:
        """The record that `to_dict` made; KeyError or TypeError when it is not one."""
        generated = record["generated"]
        lists = {name: tuple(record[name]) for name in ("choices", "logliks")}
        made = None if generated is None else Generated(**generated)
        return cls(**{**record, **lists, "generated": made})


def pair(reference: Iterable[Item], candidate: Iterable[Item]) -> list[tuple[Item, Item]]:
    """(source's, candidate's) record of each question, in the source's order.

    Raises UserError where the two did not answer exactly the same questions.
    """
    ours = list(reference)
    theirs = {item.key: item for item in candidate}
    missing = [item.key for item in ours if item.key not in theirs]
    if missing or len(theirs) != len(ours):
        raise UserError(
            f"the source answered {len(ours)} questions and the candidate {len(theirs)}"
            + (f"; the candidate lacks {missing[0][0]} {missing[0][1]}" if missing else "")
            + ": only the same questions can be compared",
            "tasks",
        )
    for item in ours:
        if theirs[item.key].doc_digest != item.doc_digest:
            raise UserError(
                f"question {item.item_id} of {item.task} is not the same for both models: its data changed",
                "tasks",
            )
    return [(item, theirs[item.key]) for item in ours]
