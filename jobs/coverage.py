"""Describe how much of a federation's data has counted so far, by its server's last report."""

from __future__ import annotations

from collections.abc import Sequence

from django.urls import reverse

from jobs.models import Attempt, Event
from portal import notify
from training.federation.tables import Coverage

FROM_ROUND = 5
"""A running federation is not described before this round: late updates of the first rounds may still arrive."""
KIND = "federation.coverage"


def coverage_of(attempts: Sequence[Attempt]) -> Coverage | None:
    """Return the coverage in the server's newest report; None before the first, and for other kinds of jobs."""
    rows = Event.objects.filter(attempt__in=attempts, kind="round.clients", rank=0).order_by("-id")
    data = rows.values_list("data", flat=True).first()
    return Coverage.unpack(data.get("coverage")) if data is not None else None


def sentence_of(attempts: Sequence[Attempt]) -> str:
    """Return a sentence on the clients that never counted; "" if all did, and in the first rounds of a running job."""
    latest = attempts[-1] if attempts else None
    if latest is None or (latest.ended_at is None and (latest.step or 0) < FROM_ROUND):
        return ""
    found = coverage_of(attempts)
    return found.text if found is not None else ""


def notify_excluded(attempt: Attempt) -> None:
    """Notify the owner of a completed federation that clients were selected and their updates never counted."""
    job = attempt.job
    if job.kind != "federated" or attempt.state != Attempt.State.COMPLETED:
        return
    coverage = coverage_of(list(job.attempts.order_by("number")))
    if coverage is None or not coverage.excluded:
        return
    who = ", ".join(map(str, coverage.foremost))
    notify.raise_notice(
        f"{KIND}:{job.pk}",
        kind=KIND,
        to=job.owner,
        title=f"#{job.pk} {job.name} completed without some of its clients: {coverage.text}",
        detail=f"Clients with the most samples: {who}. No round's model includes their data. Give them more time "
        "(run.deadline.quantile), or use late updates.",
        link=reverse("job", args=[job.pk]),
        project=job.project,
    )
