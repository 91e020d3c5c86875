"""Take back a restart that a later verdict contradicts, as long as no scheduler has it."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import F, Q

from jobs import live
from jobs.following.decisions.policy import Decision, decide
from jobs.models import Attempt, Incident


@dataclass(frozen=True)
class Objection:
    """Why an attempt is not to start after all."""

    before: Attempt
    decision: Decision
    text: str

    def note(self) -> None:
        """Store this with the attempt before, in the transaction that ends this attempt unsubmitted."""
        changes = {"decision": self.text, "decided_version": self.decision.version}
        Attempt.objects.filter(pk=self.before.pk).update(**changes)
        live.announce(self.before.pk)


def objection(attempt: Attempt) -> Objection | None:
    """Return what a newer verdict, or a person's since the decision, says against the restart; None if nothing."""
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
    text = f"{decision.text} Attempt {attempt.number}, decided before this was known, was not started."
    return Objection(incident.attempt, decision, text)
