"""A restart that was decided on, and that a later verdict speaks against: taken back while no scheduler has it."""

from __future__ import annotations

from django.db.models import F

from jobs import live
from jobs.following.policy import decide
from jobs.models import Attempt, Incident


def objection(attempt: Attempt) -> str:
    """Why this attempt is not to start after all; "" where nothing new is known, or where it does not matter."""
    if attempt.origin != Attempt.Origin.RESTARTED:
        return ""
    revised = Incident.objects.filter(
        attempt__job=attempt.job_id,
        attempt__number=attempt.number - 1,
        incarnation=None,
        version__gt=F("attempt__decided_version"),
    )
    incident = revised.select_related("attempt__job__project", "attempt__job__owner", "attempt__resume_from").first()
    if incident is None:
        return ""
    before = incident.attempt
    decision = decide(before, before.cause)
    if decision.restart:
        return ""
    text = f"{decision.text} Attempt {attempt.number}, decided on before that was known, was not started."
    Attempt.objects.filter(pk=before.pk).update(decision=text, decided_version=decision.version)
    live.announce(before.pk)
    return text
