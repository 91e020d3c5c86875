"""Load a job with its attempts and checkpoints for the head of its page, in few queries."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import Count, F, Max
from django.utils import timezone

from jobs import rounds
from jobs.checkpoints import newest_on_line
from jobs.client_name import called
from jobs.gathering.clients import RELIABLE
from jobs.incarnations import spread
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Checkpoint, Client, Event, Incident, Job
from jobs.presenting import header
from jobs.presenting.sentence import WorstClient, soon
from jobs.presenting.size import is_elastic, limit_seconds
from jobs.progress import progress
from training.federation.tables import FEWEST_EVALUATED

MOST_EVENTS = 600
EVALUATED_WITHIN = 20
"""Rounds: whom the model serves worst is told only of those in which clients were judged."""


def load(job: Job, now: datetime | None = None) -> header.JobLife:
    """Load the job's attempts, checkpoints and progress in few queries."""
    now = now or timezone.now()
    attempts = list(
        job.attempts.select_related("resume_from", "cancel_asked_by", "kill_requested_by").order_by("number")
    )
    checkpoints: list[Checkpoint] = list(
        job.checkpoints.exclude(state=Checkpoint.State.PRUNED)
        .order_by("-created_at", "-pk")
        .annotate(attempt_number=F("attempt__number"))
    )
    latest = attempts[-1]
    done = progress(latest, now)
    limit = limit_seconds(job.spec)
    return header.JobLife(
        job=job,
        attempts=attempts,
        checkpoints=checkpoints,
        progress=done,
        now=now,
        resumable=_resumable(latest, checkpoints),
        done_at=soon(now, done.eta_seconds),
        limit_at=latest.started_at + timedelta(seconds=limit) if latest.started_at and limit else None,
        restarts=_restarts(attempts),
        exchange=_round_traffic(job, attempts) if job.kind == "federated" else None,
        saved=_saved(job),
        spread=spread(latest) if is_elastic(job.spec) else None,
        postmortems=frozenset(
            Incident.objects.filter(attempt__in=attempts, incarnation=None).order_by().values_list("attempt", flat=True)
        ),
    )


def _resumable(latest: Attempt, checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the newest checkpoint on the latest attempt's parent chain, or the newest of all if that chain has none
    left.
    """
    resumable = [checkpoint for checkpoint in checkpoints if checkpoint.resumable]
    return (newest_on_line(latest) or resumable[0]) if resumable else None


def _round_traffic(job: Job, attempts: list[Attempt]) -> header.RoundTraffic | None:
    """Return a federation's newest round; None before the first."""
    newest = rounds.newest(rounds.spans(attempts), EVALUATED_WITHIN)
    if not newest:
        return None
    row = newest[-1]
    worst = next((row.worst for row in reversed(newest) if row.worst is not None), None)
    sent = rounds.sent_bytes([owner_of(attempt.pk) for attempt in attempts])
    return header.RoundTraffic(
        counted=row.counted, selected=row.asked, seconds=row.seconds, worst=_worst(job, worst), sent_bytes=sent
    )


def _worst(job: Job, client: int | None) -> WorstClient:
    """Return the client that the server named as worst, unless too few samples evaluate it."""
    few, measured = Count("pk", filter=~RELIABLE), Count("evaluation_samples")
    counts = Client.objects.filter(job=job).aggregate(few=few, known=measured)
    row = Client.objects.filter(job=job, number=client).first() if client is not None else None
    samples = row.evaluation_samples if row else None
    is_named = client is not None and (samples is None or samples >= FEWEST_EVALUATED)
    return WorstClient(
        name=called(client, row.name if row else "") if client is not None and is_named else "",
        samples=samples,
        unreliable=counts["few"],
        is_nobody=0 < counts["known"] == counts["few"],
    )


def _saved(job: Job) -> dict[int, tuple[int, datetime]]:
    rows = job.checkpoints.exclude(state=Checkpoint.State.CORRUPT).order_by().values_list("attempt_id")
    return {pk: (step, at) for pk, step, at in rows.annotate(Max("step"), Max("created_at")) if pk is not None}


def _restarts(attempts: list[Attempt]) -> dict[int, list[tuple[datetime, str]]]:
    """Return restarts in place by attempt id."""
    events = Event.objects.filter(attempt__in=attempts, kind__in=header.RECOVERIES).order_by("id")
    rows = events.values_list("kind", "attempt_id", "incarnation", "time", "data")[:MOST_EVENTS]
    return header.recoveries(list(rows), {attempt.pk: attempt.incarnation for attempt in attempts})
