"""Tasks that are made by rule, so that a gate has task evidence on any machine: no data, no network.

Three have choices: sums and differences, the next word of a list that is being copied, a number among many in
the context. Three are answered freely: one-step word problems, counting on, reciting a list; the last two
make long answers, in which a damaged model loses its thread. A free answer is right when it begins with what
was to be said, and has a few tokens more than that takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qinfer.evals import rules
from qinfer.evals.items import Item, Kind
from qinfer.evals.rules import Draw, Question
from qinfer.evals.scorer import Scorer
from qinfer.sampling_params import SamplingParams

_SPARE_TOKENS = 8  # beyond those of the right answer


@dataclass(frozen=True)
class RuleTask:
    """`size` questions of one rule; `chat`: they go through the model's chat template."""

    name: str
    kind: Kind
    size: int
    make: Callable[[Draw], Question]
    chat: bool = False

    def __len__(self) -> int:
        return self.size

    def digest(self) -> str:
        """SHA-256 (hex) of its questions and of how they are put."""
        asked = [self.question(i) for i in range(self.size)]
        return hashlib.sha256(json.dumps([self.chat, asked]).encode()).hexdigest()

    def question(self, item_id: int) -> Question:
        """Question `item_id` of the task."""
        return self.make(Draw(self.name, item_id))

    def ask(self, scorer: Scorer, item_ids: Sequence[int]) -> list[Item]:
        """The model's answers to these questions, in that order."""
        questions = [self.question(i) for i in item_ids]
        prompts = [self._shown(scorer, one) for one in questions]
        answer = self._choose if self.kind == "choice" else self._say
        return answer(scorer, list(zip(item_ids, questions, prompts, strict=True)))

    def _choices(self, item_id: int, question: Question) -> tuple[str, ...]:
        """The choices in an order of their own; after a template's prompt none begins with a space."""
        draw = Draw(f"{self.name} choices", item_id)
        choices = [question.answer, *question.wrong]
        return tuple(self._spoken(choice) for choice in draw.some(choices, len(choices)))

    def _spoken(self, answer: str) -> str:
        return answer.lstrip() if self.chat else answer

    def _shown(self, scorer: Scorer, question: Question) -> str:
        if not self.chat:
            return question.prompt
        message = {"role": "user", "content": question.prompt}
        return scorer.tokenizer.render_chat([message], add_generation_prompt=True)

    def _choose(self, scorer: Scorer, asked: Sequence[tuple[int, Question, str]]) -> list[Item]:
        ordered = [self._choices(item_id, one) for item_id, one, _ in asked]
        pairs = [
            scorer.encode_pair(prompt, choice)
            for (_, _, prompt), choices in zip(asked, ordered, strict=True)
            for choice in choices
        ]
        found = iter(scorer.logliks(pairs))
        items = []
        for (item_id, question, prompt), choices in zip(asked, ordered, strict=True):
            logliks = tuple(next(found).loglik for _ in choices)
            best = max(range(len(choices)), key=lambda i: logliks[i])
            right = choices.index(self._spoken(question.answer))
            correct = best == right and all(one > float("-inf") for one in logliks)
            item = self._item(item_id, question, prompt, choices[best], correct)
            items.append(replace(item, choices=choices, logliks=logliks, chance=1 / len(choices)))
        return items

    def _say(self, scorer: Scorer, asked: Sequence[tuple[int, Question, str]]) -> list[Item]:
        prompts = []
        for _, question, prompt in asked:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=len(scorer.encode(question.answer)) + _SPARE_TOKENS,
                stop=["\n"],
                repetition_penalty=scorer.repetition_penalty,
            )
            prompts.append((scorer.encode(prompt), params))
        items = []
        for (item_id, question, prompt), said in zip(asked, scorer.generate(prompts), strict=True):
            text = said.text.split("\n")[0]
            correct = text.strip().startswith(question.answer.strip())
            item = self._item(item_id, question, prompt, text, correct)
            items.append(replace(item, generated=said.generated))
        return items

    def _item(self, item_id: int, question: Question, prompt: str, answer: str, correct: bool) -> Item:
        """The record of an answer, but for what only choices or only free answers have."""
        metric = "acc" if question.wrong else "exact_match"
        return Item(
            task=self.name,
            item_id=item_id,
            kind=self.kind,
            doc_digest=hashlib.sha256(json.dumps(question).encode()).hexdigest(),
            prompt=prompt,
            choices=(),
            logliks=(),
            target=self._spoken(question.answer),
            answer=answer,
            metric=metric,
            correct=correct,
            scores={metric: float(correct)},
        )


_TASKS = (
    RuleTask("builtin_arithmetic", "choice", 400, rules.arithmetic),
    RuleTask("builtin_copying", "choice", 400, rules.copying),
    RuleTask("builtin_retrieval", "choice", 400, rules.retrieval),
    RuleTask("builtin_problems", "generation", 100, rules.problem),
    RuleTask("builtin_counting", "generation", 24, rules.counting),
    RuleTask("builtin_recital", "generation", 24, rules.recital),
)
NAMES = tuple(task.name for task in _TASKS)


def task_named(name: str, *, chat: bool = False) -> RuleTask:
    """The task of one of NAMES."""
    (task,) = (task for task in _TASKS if task.name == name)
    return replace(task, chat=chat)
