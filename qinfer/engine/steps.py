"""From a plan to what it sampled: the runner's work, and what requests want of it beside the next token."""

from __future__ import annotations

from typing import NamedTuple

from qinfer.engine.continuation import score_continuations
from qinfer.engine.plan import StepPlan
from qinfer.engine.request import Sequence
from qinfer.engine.runner import Launched, StepRunner
from qinfer.engine.sampler import Sampled, Spell, draw_of, sample
from qinfer.engine.scoring import score_prompt


class Step(NamedTuple):
    """A plan with the sequences of its chunks."""

    plan: StepPlan
    sequences: list[Sequence]

    @property
    def ready(self) -> list[Sequence]:
        """Those that get a token, in the plan's order."""
        return [seq for seq, chunk in zip(self.sequences, self.plan.chunks, strict=True) if chunk.sample]

    @property
    def token_ids(self) -> dict[int, list[int]]:
        """The tokens of its sequences, as far as they are known."""
        return {seq.seq_id: seq.token_ids for seq in self.sequences}


class UnderWay(NamedTuple):
    """A step that was launched and is not yet booked."""

    step: Step
    launched: Launched

    def sampled(self) -> list[Sampled]:
        """Waits for its tokens."""
        return [Sampled(max(token, 0), broken=token < 0) for token in self.launched.tokens()]


def launch(step: Step, runner: StepRunner) -> UnderWay:
    """Starts a step, of which no sequence looks back, tokens included."""
    return UnderWay(step, runner.launch(step.plan, step.token_ids, draw_of(step.ready)))


def run(step: Step, runner: StepRunner, rows: int, spell: Spell | None) -> list[Sampled]:
    """Runs a step to its end, and scores or pools what its sequences ask of their prompts.

    At most `rows` rows of logits exist at a time for that; returns what `step.ready` got.
    """
    plan, sequences = step
    scored = frozenset(seq.seq_id for seq in sequences if seq.scores_prompt)
    out = runner.run(plan, step.token_ids, scored)
    score_continuations(plan, sequences, out, runner, rows)
    for seq, chunk in zip(sequences, plan.chunks, strict=True):
        if seq.seq_id in scored and seq.request.continuation is None:
            score_prompt(seq.request, chunk, out.hidden[seq.seq_id], runner, rows, spell)
    ready = step.ready
    return sample(out.logits, ready, spell) if ready else []
