"""Write the headline of a post-mortem: what happened, how the job continued, what is left to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diagnosis.causes import Cause
from jobs.presenting.postmortems.cost import Cost, NextAttempt
from vigil_core import formatting

OLD_ENDING = "Your move."  # of decisions stored before version 0.2
# It may differ from the final verdict. Decisions stored by version 0.2 and before say "sure".
_CAUSE_AT_DECISION = re.compile(r"[^.]+ \(\d+ % (?:confidence|sure)\)\. ")


@dataclass(frozen=True)
class Headline:
    """`lead` is emphasised, `rest` follows it muted; `move` is what the reader should do, in bold."""

    lead: str
    rest: str = ""
    move: str = ""


def headline(
    *,
    verdict_text: str,
    cause: Cause,
    advice: str,
    decision: str,
    again: NextAttempt | None,
    cost: Cost,
    unit: str = "step",
) -> Headline:
    """Return the headline. `verdict_text` states the cause, by the evidence or by a person."""
    if again is None:
        rest = decision.removesuffix(OLD_ENDING).strip() or "The next step is being decided."
        if rest.startswith(cause.heading) or _CAUSE_AT_DECISION.match(rest):  # the verdict states the cause
            rest = rest.partition(". ")[2] or rest
        acts = cause.owner in {"researcher", "both"} and decision
        return Headline(verdict_text, rest, advice if acts else "")
    resumption = _resumption_text(again, cost, unit)
    if cause.owner in {"sysadmin", "nobody"}:
        return Headline(verdict_text, f"{resumption} No action needed.")
    return Headline(verdict_text, resumption)


def _resumption_text(again: NextAttempt, cost: Cost, unit: str) -> str:
    where = f" on {formatting.listed(list(again.nodes))}" if 0 < len(again.nodes) <= 2 else ""
    start = f"from {unit} {formatting.count(again.from_step)}" if again.from_step else "from the beginning"
    if again.first_step_at is not None:
        after = f" after {formatting.duration(cost.resume_seconds)}" if cost.resume_seconds is not None else ""
        return f"Training resumed {start}{where}{after}."
    if again.ended_at is not None:
        return f"Attempt {again.number} was to resume {start}, but ended before it completed a {unit}."
    if again.started_at is not None:
        return f"Attempt {again.number} has started{where} {start}; it has not completed a {unit} yet."
    return f"Attempt {again.number} is in the queue and will resume {start}."
