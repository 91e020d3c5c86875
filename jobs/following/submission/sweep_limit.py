"""Limit how many jobs of a sweep run at the same time where no scheduler's array does: the others wait here."""

from __future__ import annotations

from django.db.models import Q

from jobs import live
from jobs.models import Attempt, Sweep


def waiting_attempts() -> list[int]:
    """Return first attempts that wait until fewer of their sweep run, and store that as their reason.

    An attempt that has ended counts until Vigil has decided what follows: its restart takes the same place.
    """
    attempt_ids: list[int] = []
    waits = Q(number=1, scheduler_id="", ended_at=None, submitting_at=None, cancel_asked_at=None)
    some_wait = Attempt.objects.filter(waits, job__sweep__at_once__isnull=False).values("job__sweep")
    for sweep in Sweep.objects.filter(pk__in=some_wait).defer("spec_toml"):
        attempts = Attempt.objects.filter(job__sweep=sweep)
        busy = attempts.filter(Q(ended_at=None) | Q(decided_at=None)).exclude(waits).count()
        waiting = list(attempts.filter(waits).order_by("job__sweep_index").values_list("pk", "reason"))
        assert sweep.at_once is not None
        rest = waiting[max(0, sweep.at_once - busy) :]
        _set_reason(sweep.at_once, [pk for pk, reason in rest if not reason])
        attempt_ids += [pk for pk, _ in rest]
    return attempt_ids


def _set_reason(at_once: int, waiting: list[int]) -> None:
    reason = f"Waiting for its turn: its sweep runs {at_once} jobs at once."
    for attempt_id in waiting:
        if Attempt.objects.filter(pk=attempt_id, scheduler_id="", reason="").update(reason=reason):
            live.announce(attempt_id)
