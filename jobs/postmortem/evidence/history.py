"""Collect the history around a failure: checkpoints, changes since the previous attempt, other failures nearby."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from django.db.models import Q

from diagnosis.causes import CAUSES, NONE, UNKNOWN
from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.sign import Sign
from jobs.disk import provenance
from jobs.incarnations import STARTED, number_of
from jobs.models import Attempt, Checkpoint, Event, Incident
from jobs.models.incident import IncidentQuerySet
from jobs.postmortem.evidence.collected import NEAR_END, IncidentEvidence, context
from jobs.postmortem.evidence.ranks import EVENTS
from vigil_core import untrusted

NEAR_IN_TIME = timedelta(minutes=2)
MAX_OTHERS = 1_000
MAX_CHANGES = 8
MAX_DAMAGED = 4
CHECKPOINTS, ENVIRONMENT, OTHERS = "checkpoints", "environment", "other jobs"
# Causes that jobs share and no single job is to blame for.
_SHARED = frozenset({"storage.io", "storage.full", "network.fabric", "scheduler.node_fail", "environment.driver"})
_MAX_ALONE = 1  # with so few other failures nothing follows


def collect_checkpoints(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add the checkpoint that the attempt started from, damaged ones, and those that were left to resume from."""
    attempt = incident.attempt
    events = Event.objects.filter(attempt=attempt, kind="checkpoint.damaged", incarnation=found.incarnation)
    damaged: set[str] = set()
    for event in events.order_by("id")[:MAX_DAMAGED]:
        name, why = untrusted.name(event.data.get("name"), 64), untrusted.line(event.data.get("reason"), 300)
        damaged.add(name)
        prefix = Prefix(stamp=event.time.timestamp(), is_dated=True)
        text = f"{name} was found damaged: {why}"
        found.signs.append(
            Sign(EVENTS, 0, text, cause="checkpoint.corrupt", role="confirmation", prefix=prefix, source_kind="trainer")
        )
    started = _started_from(attempt, found.incarnation)
    rows = Checkpoint.objects.filter(job=attempt.job_id)
    checkpoint = rows.by_name(started).first() if started else None
    if checkpoint is not None and checkpoint.state == Checkpoint.State.CORRUPT and checkpoint.name not in damaged:
        text = f"{checkpoint.name}, which it started from, is corrupt: {checkpoint.problem}"
        found.signs.append(
            Sign(
                CHECKPOINTS,
                0,
                text,
                cause="checkpoint.corrupt",
                role="confirmation",
                prefix=Prefix(),
                source_kind="trainer",
            )
        )
    if damaged or (checkpoint is not None and checkpoint.state == Checkpoint.State.CORRUPT):
        whole = rows.resumable().exclude(name__in=damaged).order_by("-generation", "-step")
        names = list(whole.values_list("name", flat=True)[:3])
        left = (
            f"checkpoints to resume from: {', '.join(names)}"
            if names
            else "there is no other checkpoint to resume from"
        )
        found.signs.append(context(CHECKPOINTS, left, cause="checkpoint.corrupt"))


def _started_from(attempt: Attempt, incarnation: int) -> str:
    started = Event.objects.filter(attempt=attempt, kind=STARTED).order_by("-id").values_list("data", flat=True)
    names = (data.get("resumed_from") for data in started[:20] if number_of(data) == incarnation)
    return untrusted.name(next(names, ""), 64)


def collect_environment_changes(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add packages, driver and code that changed since the previous attempt; never a cause by themselves."""
    ran = provenance.compare_with_earlier(incident.attempt)
    if ran is None:
        return
    found.available.add("environment")
    if not ran.changes:
        return
    changes = [
        f"{change.what} {change.before or 'absent'} → {change.after or 'absent'}"
        for change in ran.changes[:MAX_CHANGES]
    ]
    more = f" and {len(ran.changes) - MAX_CHANGES:,} more" if len(ran.changes) > MAX_CHANGES else ""
    text = f"changed since attempt {ran.since}: {', '.join(changes)}{more}"
    found.signs.append(context(ENVIRONMENT, text, cause="environment.package"))


def collect_other_failures(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add how many other jobs failed within two minutes, or within ten on a node of this one; never which."""
    attempt, at = incident.attempt, incident.at
    near = Incident.objects.filter(at__gte=at - NEAR_IN_TIME, at__lte=at + NEAR_IN_TIME)
    others = _others(near, attempt)
    if others:
        found.signs.append(_sign_of_others(others))
    if attempt.nodes:
        same = Incident.objects.filter(node__in=attempt.nodes, at__gte=at - NEAR_END, at__lte=at + NEAR_END)
        for node, count in Counter(node for node, _ in _others(same, attempt).values()).most_common(3):
            jobs = "another job" if count == 1 else f"{count:,} other jobs"
            text = f"{jobs} failed on {node} within {NEAR_END.total_seconds() / 60:.0f} minutes"
            found.signs.append(context(OTHERS, text, node=node))


def _others(incidents: IncidentQuerySet, attempt: Attempt) -> dict[int, tuple[str, str]]:
    """Return node and cause by job, without jobs of the same sweep. A cause that a person gave is not evidence."""
    same_job = Q(attempt__job=attempt.job_id)
    if attempt.job.sweep_id:
        same_job |= Q(attempt__job__sweep=attempt.job.sweep_id)
    rows = incidents.exclude(same_job).exclude(cause=NONE).order_by("-at")
    found = rows.values_list("attempt__job", "node", "cause", "overruled_cause")[:MAX_OTHERS]
    return {job: (node, UNKNOWN if overruled else cause) for job, node, cause, overruled in found}


def _sign_of_others(others: dict[int, tuple[str, str]]) -> Sign:
    """Return a sign of what they have in common, where that is something that jobs share."""
    count = len(others)
    jobs = "another job" if count == 1 else f"{count:,} other jobs"
    text = f"{jobs} failed within two minutes"
    causes = Counter(cause for _, cause in others.values() if cause and cause != UNKNOWN)
    cause, most = causes.most_common(1)[0] if causes else (UNKNOWN, 0)
    if most > _MAX_ALONE:
        text += f", {most:,} of them for the same cause: {CAUSES[cause].title}"
        if cause in _SHARED:
            return Sign(OTHERS, 0, text, cause=cause, role="confirmation", prefix=Prefix(), source_kind="others")
    return context(OTHERS, text)
