"""From a plan to what it sampled: the runner's work, and what requests want of it beside the next token."""

from __future__ import annotations

from typing import NamedTuple

from qinfer.engine.continuation import score_continuations
from qinfer.engine.plan import StepPlan
from qinfer.engine.request import Sequence
from qinfer.engine.roster import Roster
from qinfer.engine.runner import Launched, StepRunner, TokenIds
from qinfer.engine.sampler import Sampled, Spell, draw_of, sample
from qinfer.engine.scoring import score_prompt


class Step(NamedTuple):
    """A plan with the sequences of its chunks."""

    plan: StepPlan
    sequences: list[Sequence]
    ready: list[Sequence]  # those that get a token, in the plan's order
    token_ids: TokenIds  # of its sequences among others

    @classmethod
    def of(cls, plan: StepPlan, roster: Roster) -> Step:
        """A plan that was just made, for sequences that the roster knows."""
        sequences = roster.sequences_of(plan)
        ready = [seq for seq, chunk in zip(sequences, plan.chunks, strict=True) if chunk.sample]
        return cls(plan, sequences, ready, roster.token_ids)


class UnderWay(NamedTuple):
    """A step that was launched and is not yet booked."""

    step: Step
    launched: Launched

    def sampled(self) -> list[Sampled]:
        """Waits for its tokens."""
        return [Sampled(token) for token in self.launched.tokens()]


def launch(step: Step, runner: StepRunner) -> UnderWay:
    """Starts a step, of which no sequence looks back, tokens included."""
    return UnderWay(step, runner.launch(step.plan, step.token_ids, draw_of(step.ready)))


def run(step: Step, runner: StepRunner, rows: int, spell: Spell | None) -> list[Sampled]:
    """Runs a step to its end, and scores or pools what its sequences ask of their prompts.

    At most `rows` rows of logits exist at a time for that; returns what `step.ready` got.
    """
    plan, sequences, ready, token_ids = step
    scored = frozenset(seq.seq_id for seq in sequences if seq.scores_prompt)
    out = runner.run(plan, token_ids, scored)
    score_continuations(plan, sequences, out, runner, rows)
    for seq, chunk in zip(sequences, plan.chunks, strict=True):
        if seq.seq_id in scored and seq.request.continuation is None:
            score_prompt(seq.request, chunk, out.hidden[seq.seq_id], runner, rows, spell)
    return sample(out.logits, ready, spell) if ready else []
