"""A restart that was decided on, and that a later word speaks against: taken back while no scheduler has it."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import F, Q

from jobs import live
from jobs.following.policy import Decision, decide
from jobs.models import Attempt, Incident


@dataclass(frozen=True)
class Objection:
    """Why an attempt is not to start after all."""

    before: Attempt
    decision: Decision
    text: str

    def note(self) -> None:
        """Say so where it had been decided on; in the transaction that ends the attempt unsubmitted."""
        told = {"decision": self.text, "decided_version": self.decision.version}
        Attempt.objects.filter(pk=self.before.pk).update(**told)
        live.announce(self.before.pk)


def objection(attempt: Attempt) -> Objection | None:
    """By a later verdict, or a person's word since the decision; None where nothing is new, or it does not matter."""
    if attempt.origin != Attempt.Origin.RESTARTED:
        return None
    newer = Q(version__gt=F("attempt__decided_version")) | Q(overruled_at__gt=F("attempt__decided_at"))
    ends = Incident.objects.filter(newer, attempt__job=attempt.job_id, attempt__number=attempt.number - 1)
    rows = ends.filter(incarnation=None).select_related(
        "attempt__job__project", "attempt__job__owner", "attempt__resume_from"
    )
    if (incident := rows.first()) is None:
        return None
    decision = decide(incident.attempt, incident.attempt.cause)
    if decision.restart:
        return None
    text = f"{decision.text} Attempt {attempt.number}, decided on before that was known, was not started."
    return Objection(incident.attempt, decision, text)
