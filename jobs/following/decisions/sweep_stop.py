"""Stop a sweep whose first jobs all fail for the same reason in their own program, and explain why."""

from __future__ import annotations

from django.db.models import F
from django.utils import timezone

from diagnosis.causes import CAUSES
from jobs.models import Attempt, Incident, Sweep

FIRST = 3


def stop_sweep(attempt: Attempt) -> bool:
    """Stop the part of this attempt's sweep that has not started, if it would only fail alike. Return whether it did.

    Runs in the transaction that stores that the attempt is not restarted. Running jobs continue, and every stopped job
    can be resumed.
    """
    sweep_id = attempt.job.sweep_id
    if sweep_id is None or not (shared := _shared_failure(sweep_id)):
        return False
    waiting = Attempt.objects.filter(
        job__sweep=sweep_id, number=1, started_at=None, ended_at=None, cancel_asked_at=None
    )
    if not waiting.exists():
        return False
    why = f"Its first {FIRST} jobs failed for the same reason: {shared} Jobs that had not started were cancelled."
    if Sweep.objects.filter(pk=sweep_id, stopped_why="").update(stopped_why=why) != 1:
        return False
    waiting.update(cancel_asked_at=timezone.now())
    return True


def _shared_failure(sweep_id: int) -> str:
    """Return the first ended jobs' verdict, if they share a fingerprint and a cause that is their owner's to fix."""
    ended = Attempt.objects.filter(job__sweep=sweep_id, job__latest=F("pk")).exclude(ended_at=None)
    first = list(ended.exclude(decided_at=None).order_by("ended_at", "pk").values_list("pk", flat=True)[:FIRST])
    if len(first) < FIRST:
        return ""
    rows = Incident.objects.filter(attempt__in=first, incarnation=None, version__gt=0)
    incidents = list(rows.values_list("fingerprint", "cause", "overruled_cause", "says"))
    causes = {CAUSES.get(overruled or cause) for _, cause, overruled, _ in incidents}
    if len(incidents) < FIRST or len({fingerprint for fingerprint, *_ in incidents}) > 1 or not incidents[0][0]:
        return ""
    cause = causes.pop()
    if causes or cause is None or cause.owner != "researcher":
        return ""
    text = incidents[0][3].strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
