"""A sweep whose first jobs all die of one failure of their own program: it starts no more of them, and says so."""

from __future__ import annotations

from django.db.models import F
from django.utils import timezone

from diagnosis.causes import CAUSES
from jobs.models import Attempt, Incident, Sweep

FIRST = 3


def stop_sweep(attempt: Attempt) -> bool:
    """Stop what this attempt's sweep has not started yet, if that would only fail alike. In the transaction that says
    that the attempt is not started anew; what runs goes on, and each that was stopped can be resumed.
    """
    sweep_id = attempt.job.sweep_id
    if sweep_id is None or not (shared := _what_all_died_of(sweep_id)):
        return False
    waiting = Attempt.objects.filter(
        job__sweep=sweep_id, number=1, started_at=None, ended_at=None, cancel_asked_at=None
    )
    if not waiting.exists():
        return False
    why = f"Its first {FIRST} jobs died of the same: {shared} Whatever had not started was cancelled."
    if Sweep.objects.filter(pk=sweep_id, stopped_why="").update(stopped_why=why) != 1:
        return False
    waiting.update(cancel_asked_at=timezone.now())
    return True


def _what_all_died_of(sweep_id: int) -> str:
    """The verdict in a sentence, where the first jobs to end have one fingerprint, and whose move it is, is theirs."""
    ended = Attempt.objects.filter(job__sweep=sweep_id, job__latest=F("pk")).exclude(ended_at=None)
    first = list(ended.exclude(decided_at=None).order_by("ended_at", "pk").values_list("pk", flat=True)[:FIRST])
    if len(first) < FIRST:
        return ""
    rows = Incident.objects.filter(attempt__in=first, incarnation=None, version__gt=0)
    found = list(rows.values_list("fingerprint", "cause", "overruled_cause", "says"))
    causes = {CAUSES.get(overruled or cause) for _, cause, overruled, _ in found}
    if len(found) < FIRST or len({fingerprint for fingerprint, *_ in found}) > 1 or not found[0][0]:
        return ""
    cause = causes.pop()
    if causes or cause is None or cause.owner != "researcher":
        return ""
    says = found[0][3].strip()
    return says if says.endswith((".", "!", "?")) else f"{says}."
