"""Notify people of failures: one notice per incident, once there are a verdict and a decision.

    owner          what happened, how sure, who must act, what Vigil did; also sent to the project's channels
    sysadmins      where they must act and the machine or the scheduler itself reports it: one per cause, node and day,
                   however many jobs failed. What a program printed, or a person said, goes to the owner alone

Jobs of a sweep that fail alike share one notice with their number. A revised or overruled verdict changes the text;
only one that makes somebody else act is sent again, and a notice is withdrawn when nobody has to act any more.
Everything is derived from rows, and raising a notice twice has no effect, so a process that is killed in between loses
nothing.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.urls import reverse
from django.utils import timezone

from diagnosis.causes import CAUSES, Cause, unconfirmed
from diagnosis.verdict import reported_by
from jobs.models import Checkpoint, Incident
from portal import notify
from portal.models import Notice
from portal.notify import SYSADMINS
from vigil_core import formatting

logger = logging.getLogger(__name__)

KIND, SITE = "incident", "incident.site"
DECISION_WAIT = timedelta(seconds=45)  # for the decision; after that the notice is raised without it
MAX_AGE = timedelta(days=1)  # nobody is notified of older incidents
BUDGET_S = 5.0  # per call: verdicts, which decide restarts, wait meanwhile; the next call continues
SETTLE_TIME = timedelta(minutes=1)  # that a message waits for more jobs that failed alike
WHO_ACTS = {"researcher": "you, or the program's author", "sysadmin": "a sysadmin", "both": "you or a sysadmin"}
SYSADMIN_CAUSES = [cause.code for cause in CAUSES.values() if cause.owner == "sysadmin"]

_notified: dict[int, tuple[object, ...]] = {}  # by this process; a new process raises all of them again, without effect


def forget() -> None:
    """Forget what this process has notified of, as if it had just started."""
    _notified.clear()


def notify_new(now: datetime | None = None) -> int:
    """Notify of what is new about incidents since the last call; return how many incidents that were."""
    now = now or timezone.now()
    old = Incident.objects.filter(opened_at__lt=now - MAX_AGE).order_by("-pk").values_list("pk", flat=True).first()
    names = ("pk", "opened_at", "version", "cause", "confirmed_cause", "overruled_cause", "attempt__decided_at")
    rows = Incident.objects.filter(incarnation=None, pk__gt=old or 0).order_by("-pk").values_list(*names)
    recent, count, until = set(), 0, time.monotonic() + BUDGET_S
    for pk, opened_at, version, *causes, decided_at in rows:
        recent.add(pk)
        mark = (version, *causes, decided_at)
        if not version or _notified.get(pk) == mark or (decided_at is None and opened_at > now - DECISION_WAIT):
            continue
        if time.monotonic() > until:
            continue
        try:
            _notify(pk)
        except Exception:  # continue with the others; this one is retried
            logger.exception("incident %s: no notice was raised", pk)
            continue
        _notified[pk] = mark
        count += 1
    for pk in set(_notified) - recent:
        del _notified[pk]
    return count


def _notify(incident_id: int) -> None:
    rows = Incident.objects.select_related(
        "attempt__job__owner", "attempt__job__project", "attempt__job__sweep", "overruled_by"
    )
    incident = rows.filter(pk=incident_id).first()
    cause = CAUSES.get((incident.overruled_cause or incident.cause) if incident else "")
    if incident is None or cause is None:
        return
    key = _key(incident)
    _replace_stale_notices(incident, key, cause)
    if cause.owner == "nobody":
        notify.withdraw(key)
    else:
        _notify_owner(incident, key, cause)
    _withdraw_from_sysadmins(incident)
    if incident.confirmed_cause:
        _notify_sysadmins(incident, CAUSES[incident.confirmed_cause])


def _notify_owner(incident: Incident, key: str, cause: Cause) -> None:
    alike, job = _count_alike(incident), incident.attempt.job
    notify.raise_notice(
        key,
        kind=KIND,
        to=job.owner,
        title=_title(incident, cause, alike),
        detail=advice_on(incident, cause),
        link=reverse("sweep", args=[job.sweep_id]) if alike > 1 else _postmortem_url(incident),
        tone="warn",
        facts=_facts(incident, cause, _reported_by(incident)),
        project=job.project,
        edition=cause.owner,
        settle=SETTLE_TIME if alike else timedelta(),
    )


def _key(incident: Incident) -> str:
    sweep = incident.attempt.job.sweep_id
    if sweep is None or not incident.fingerprint:
        return f"{KIND}:{incident.pk}"
    return _key_of_alike(sweep, incident.fingerprint, incident.overruled_cause)


def _key_of_alike(sweep_id: int, fingerprint: str, overruled_cause: str) -> str:
    """Return the key shared by jobs of a sweep that failed alike and have the same overruled cause, if any."""
    return f"{KIND}:sweep:{sweep_id}:{fingerprint}{f':{overruled_cause}' if overruled_cause else ''}"


def _replace_stale_notices(incident: Incident, key: str, cause: Cause) -> None:
    """Replace the owner's notices under keys that no incident has any more.

    If the same people must act, the notice is renamed to the new key, so that nobody is notified twice; else it is
    withdrawn.
    """
    job = incident.attempt.job
    if job.sweep_id is None:
        return
    before = Q(key=f"{KIND}:{incident.pk}") | Q(key__startswith=_key_of_alike(job.sweep_id, "", ""))
    stale = Notice.objects.active().filter(before, user=job.owner).exclude(key=key)
    if not (editions := dict(stale.values_list("key", "edition"))):
        return
    for old in sorted(editions.keys() - _keys_of_sweep(job.sweep_id)):
        if editions[old] == cause.owner:
            notify.rename(old, key)
        else:
            notify.withdraw(old)


def _keys_of_sweep(sweep_id: int) -> set[str]:
    """Return the current keys of notices about jobs of the sweep that failed alike."""
    rows = Incident.objects.filter(attempt__job__sweep=sweep_id, incarnation=None).exclude(fingerprint="")
    alike = rows.order_by().values_list("fingerprint", "overruled_cause").distinct()
    return {_key_of_alike(sweep_id, *row) for row in alike}


def _count_alike(incident: Incident) -> int:
    """Count the jobs of the sweep that failed alike; 0 if the job belongs to no sweep."""
    sweep = incident.attempt.job.sweep_id
    if sweep is None or not incident.fingerprint:
        return 0
    same = {"fingerprint": incident.fingerprint, "overruled_cause": incident.overruled_cause, "incarnation": None}
    return Incident.objects.filter(**same, attempt__job__sweep=sweep).values("attempt__job").distinct().count()


def _title(incident: Incident, cause: Cause, alike: int) -> str:
    job = incident.attempt.job
    sentence = incident.says or f"{cause.heading}."
    if incident.overruled_cause:
        sentence = f"{cause.heading}, according to {_person(incident)}."
    if alike > 1 and job.sweep is not None:
        return f"{alike} jobs of sweep {job.sweep.name} failed in the same way: {sentence}"
    return f"{job.name} (#{job.pk}) failed: {sentence}"


def _facts(incident: Incident, cause: Cause, witness: str) -> list[tuple[str, str]]:
    """Return the notice's table. `witness`: who reported the cause."""
    attempt = incident.attempt
    is_overruled = incident.overruled_cause == cause.code
    source = f"overruled by {_person(incident)}" if is_overruled else f"{incident.confidence or 0:.0%} confidence"
    nodes = formatting.listed(attempt.nodes[:4]) + (f" and {len(attempt.nodes) - 4} more" if attempt.nodes[4:] else "")
    return [
        ("Cause", f"{cause.code}, {source}"),
        ("Reported by", witness),
        ("Who must act", WHO_ACTS[cause.owner]),
        ("What Vigil did", attempt.decision or "nothing yet"),
        ("Lost", _lost_work(incident)),
        ("Evidence", _root_line(incident)),
        ("Attempt", f"{attempt.number}{f' on {nodes}' if nodes else ''}, project {attempt.job.project.slug}"),
        ("Runbook", f"{settings.VIGIL_PUBLIC_URL}{reverse('runbook', args=[cause.code])}"),
    ]


def _person(incident: Incident) -> str:
    return str(incident.overruled_by or "somebody")


def _reported_by(incident: Incident) -> str:
    if incident.overruled_cause:
        return f"{_person(incident)}: {incident.overruled_why}"
    return reported_by(_newest_verdict(incident))


def advice_on(incident: Incident, cause: Cause) -> str:
    """Return what to do about a cause; for hardware that no machine confirms, verify first."""
    is_claim = cause.is_hardware and incident.confirmed_cause != cause.code
    return unconfirmed(cause.advice) if is_claim else cause.advice


def _lost_work(incident: Incident) -> str:
    """Return the steps since the newest stored checkpoint; "" where that is unknown."""
    attempt = incident.attempt
    if attempt.step is None:
        return ""
    unit = attempt.job.job_kind.unit
    resumable = Checkpoint.objects.resumable().filter(job=attempt.job_id, step__lte=attempt.step)
    newest = resumable.order_by("-step").values_list("step", flat=True).first()
    if newest is None:
        return f"all {formatting.plural(attempt.step, unit)}: there is no checkpoint"
    lost = attempt.step - newest
    since = f"{formatting.plural(lost, unit)} since the checkpoint at {unit} {formatting.count(newest)}"
    return since if lost else ""


def _root_line(incident: Incident) -> str:
    """Return the line that the verdict relies on most."""
    evidence = _newest_verdict(incident).get("evidence", ())
    root = next((str(item.get("text", "")) for item in evidence if item.get("role") == "root"), "")
    return root


def _newest_verdict(incident: Incident) -> dict[str, Any]:
    """Return the newest diagnosed verdict; empty while there is none."""
    newest = incident.diagnoses.order_by("-version").first()
    return newest.verdict if newest else {}


def _postmortem_url(incident: Incident) -> str:
    attempt = incident.attempt
    return f"{reverse('job_postmortem', args=[attempt.job_id])}?attempt={attempt.number}"


def _notify_sysadmins(incident: Incident, cause: Cause) -> None:
    """Notify sysadmins that they must act: once per cause, node and day."""
    many = _incidents_of_day(incident, cause.code, incident.node).count()
    where = f" on {incident.node}" if incident.node else ""
    job = incident.attempt.job
    which = f"{formatting.plural(many, 'attempt')} failed" if many > 1 else f"{job.name} (#{job.pk}) failed"
    notify.raise_notice(
        _key_of_site(incident, cause.code, incident.node),
        kind=SITE,
        to=SYSADMINS,
        title=f"{cause.heading}{where}: {which}.",
        detail=cause.advice,
        link=reverse("node", args=[incident.node]) if incident.node else _postmortem_url(incident),
        tone="warn",
        facts=_facts(incident, cause, reported_by(_newest_verdict(incident))),
        settle=SETTLE_TIME,
    )


def _withdraw_from_sysadmins(incident: Incident) -> None:
    """Withdraw sysadmins' notices about an earlier verdict that no incident of that node and day supports any more."""
    nodes = {"", incident.node, *incident.diagnoses.values_list("verdict__node", flat=True)}
    keys = {_key_of_site(incident, code, node or ""): (code, node or "") for code in SYSADMIN_CAUSES for node in nodes}
    for key in Notice.objects.active().filter(key__in=keys).values_list("key", flat=True):
        if not _incidents_of_day(incident, *keys[key]).exists():
            notify.withdraw(key)


def _key_of_site(incident: Incident, code: str, node: str) -> str:
    return f"{SITE}:{code}:{incident.at.date()}:{node or incident.pk}"[: notify.MAX_KEY]


def _incidents_of_day(incident: Incident, code: str, node: str) -> QuerySet[Incident]:
    """Return the day's incidents with this confirmed cause on the node; without a node only this incident."""
    began = incident.at.replace(hour=0, minute=0, second=0, microsecond=0)
    same = Incident.objects.filter(confirmed_cause=code, node=node, incarnation=None)
    return same.filter(at__gte=began, at__lt=began + timedelta(days=1)) if node else same.filter(pk=incident.pk)
