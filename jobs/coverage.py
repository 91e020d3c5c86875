"""How much of a federation's data has counted so far: what its server last reported, as every page says it."""

from __future__ import annotations

from collections.abc import Sequence

from django.urls import reverse

from jobs.models import Attempt, Event
from portal import notify
from training.federation.tables import Coverage

FROM_ROUND = 5
"""While it runs nothing is said before this round: late updates of the first rounds may still arrive."""
KIND = "federation.coverage"


def coverage_of(attempts: Sequence[Attempt]) -> Coverage | None:
    """Return what the newest report of the server says; None before the first, and for other kinds of jobs."""
    rows = Event.objects.filter(attempt__in=attempts, kind="round.clients", rank=0).order_by("-id")
    data = rows.values_list("data", flat=True).first()
    return Coverage.unpack(data.get("coverage")) if data is not None else None


def sentence_of(attempts: Sequence[Attempt]) -> str:
    """Return who never counted, in a sentence; "" where all did, and in the first rounds of a run that goes on."""
    latest = attempts[-1] if attempts else None
    if latest is None or (latest.ended_at is None and (latest.step or 0) < FROM_ROUND):
        return ""
    found = coverage_of(attempts)
    return found.text if found is not None else ""


def notify_excluded(attempt: Attempt) -> None:
    """Tell the owner of a completed federation that clients were asked and never counted."""
    job = attempt.job
    if job.kind != "federated" or attempt.state != Attempt.State.COMPLETED:
        return
    found = coverage_of(list(job.attempts.order_by("number")))
    if found is None or not found.excluded:
        return
    who = ", ".join(map(str, found.foremost))
    notify.raise_notice(
        f"{KIND}:{job.pk}",
        kind=KIND,
        to=job.owner,
        title=f"#{job.pk} {job.name} completed without some of its clients: {found.text}",
        detail=f"Those with most samples: {who}. Their data are in no round's model. Give them more time "
        "(run.deadline.quantile), or use what comes late.",
        link=reverse("job", args=[job.pk]),
        project=job.project,
    )
