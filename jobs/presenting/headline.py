"""The sentences that lead a post-mortem: what happened, then how it went on, then whether anything is to be done."""

from __future__ import annotations

from dataclasses import dataclass

from diagnosis.causes import Cause
from jobs.presenting.cost import Again, Cost
from vigil_core import formatting


@dataclass(frozen=True)
class Headline:
    """`lead` is set in ink, `rest` muted after it; `move` is what the reader is asked to do, in bold."""

    lead: str
    rest: str = ""
    move: str = ""


def headline(
    *, says: str, cause: Cause, advice: str, decision: str, again: Again | None, cost: Cost, counts: str = "step"
) -> Headline:
    """`says`: the verdict's sentence, or a person's, on what its cause was."""
    if again is None:
        rest = decision.removesuffix("Your move.").strip() or "What follows is being decided."
        if rest.startswith(cause.heading):  # which is said by then
            rest = rest.partition(". ")[2] or rest
        acts = cause.owner in {"researcher", "both"} and decision
        return Headline(says, rest, advice if acts else "")
    went_on = _went_on(again, cost, counts)
    if cause.owner in {"sysadmin", "nobody"}:
        return Headline(says, f"{went_on} Nothing for its owner to do.")
    return Headline(says, went_on)


def _went_on(again: Again, cost: Cost, counts: str) -> str:
    where = f" on {formatting.listed(list(again.nodes))}" if 0 < len(again.nodes) <= 2 else ""
    start = f"from {counts} {formatting.count(again.from_step)}" if again.from_step else "from the beginning"
    if again.first_step_at is not None:
        after = f" after {formatting.duration(cost.again_seconds)}" if cost.again_seconds is not None else ""
        return f"Training went on {start}{where}{after}."
    if again.ended_at is not None:
        return f"Attempt {again.number} was to go on {start}, and ended before it had made a {counts}."
    if again.started_at is not None:
        return f"Attempt {again.number} has started{where} and goes on {start}; it has made no {counts} yet."
    return f"Attempt {again.number} waits in the queue and will go on {start}."
