"""Notices of what died: one an incident, once there is a verdict and a decision, to whoever has to know.

    its owner      what happened, how sure, who must act, what Vigil did; the project's channels, too
    sysadmins      where they must act, and the machine or the scheduler says so itself: one a cause, node and day,
                   however many jobs died of it. What a program printed, or a person said, goes to the owner alone
Jobs of a sweep that die alike are one notice with their number. A verdict that is revised, or overruled, changes the
words; only one that makes somebody else act is news again, and where nobody has to any more it is withdrawn. What is to
be told is read from the rows, and raised twice it stands once: a process that is killed in between loses nothing.
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
WAIT = timedelta(seconds=45)  # for the decision; then it is told without
LATEST = timedelta(days=1)  # what is older is told to nobody any more
BUDGET_S = 5.0  # of a look: verdicts wait meanwhile, by which restarts are decided, and the next goes on
TOGETHER = timedelta(minutes=1)  # that a message waits for more that died alike
ACTS = {"researcher": "you, or whose program it is", "sysadmin": "a sysadmin", "both": "you or a sysadmin"}
OF_SITE = [cause.code for cause in CAUSES.values() if cause.owner == "sysadmin"]

_told: dict[int, tuple[object, ...]] = {}  # by this process; one that starts anew tells all of them again, as nothing


def tell(now: datetime | None = None) -> int:
    """Tell what is new of incidents since the last look; of how many."""
    now = now or timezone.now()
    old = Incident.objects.filter(opened_at__lt=now - LATEST).order_by("-pk").values_list("pk", flat=True).first()
    names = ("pk", "opened_at", "version", "cause", "confirmed_cause", "overruled_cause", "attempt__decided_at")
    rows = Incident.objects.filter(incarnation=None, pk__gt=old or 0).order_by("-pk").values_list(*names)
    seen, count, until = set(), 0, time.monotonic() + BUDGET_S
    for pk, opened_at, version, *known, decided_at in rows:
        seen.add(pk)
        mark = (version, *known, decided_at)
        if not version or _told.get(pk) == mark or (decided_at is None and opened_at > now - WAIT):
            continue
        if time.monotonic() > until:
            continue
        try:
            _tell(pk)
        except Exception:  # the others are told nevertheless, and this one is tried again
            logger.exception("incident %s could not be told", pk)
            continue
        _told[pk] = mark
        count += 1
    for pk in set(_told) - seen:
        del _told[pk]
    return count


def _tell(incident_id: int) -> None:
    rows = Incident.objects.select_related(
        "attempt__job__owner", "attempt__job__project", "attempt__job__sweep", "overruled_by"
    )
    incident = rows.filter(pk=incident_id).first()
    cause = CAUSES.get((incident.overruled_cause or incident.cause) if incident else "")
    if incident is None or cause is None:
        return
    key = _key(incident)
    _replace(incident, key, cause)
    if cause.owner == "nobody":
        notify.withdraw(key)
    else:
        _tell_owner(incident, key, cause)
    _withdraw_of_site(incident)
    if incident.confirmed_cause:
        _tell_sysadmins(incident, CAUSES[incident.confirmed_cause])


def _tell_owner(incident: Incident, key: str, cause: Cause) -> None:
    alike, job = _alike(incident), incident.attempt.job
    notify.raise_notice(
        key,
        kind=KIND,
        to=job.owner,
        title=_title(incident, cause, alike),
        detail=advice_on(incident, cause),
        link=reverse("sweep", args=[job.sweep_id]) if alike > 1 else _page(incident),
        tone="warn",
        facts=_facts(incident, cause, _reported_by(incident)),
        project=job.project,
        edition=cause.owner,
        settle=TOGETHER if alike else timedelta(),
    )


def _key(incident: Incident) -> str:
    sweep = incident.attempt.job.sweep_id
    if sweep is None or not incident.fingerprint:
        return f"{KIND}:{incident.pk}"
    return _key_of_alike(sweep, incident.fingerprint, incident.overruled_cause)


def _key_of_alike(sweep_id: int, fingerprint: str, overruled_cause: str) -> str:
    """Of jobs of a sweep that died alike, and of which no person says otherwise than of the rest."""
    return f"{KIND}:sweep:{sweep_id}:{fingerprint}{f':{overruled_cause}' if overruled_cause else ''}"


def _replace(incident: Incident, key: str, cause: Cause) -> None:
    """What its owner was told under other keys and no incident says any more: where the same must act it goes on under
    this one, so that nobody is told twice; else it is withdrawn."""
    job = incident.attempt.job
    if job.sweep_id is None:
        return
    before = Q(key=f"{KIND}:{incident.pk}") | Q(key__startswith=_key_of_alike(job.sweep_id, "", ""))
    found = Notice.objects.standing().filter(before, user=job.owner).exclude(key=key)
    if not (editions := dict(found.values_list("key", "edition"))):
        return
    for old in sorted(editions.keys() - _keys_of_sweep(job.sweep_id)):
        if editions[old] == cause.owner:
            notify.rename(old, key)
        else:
            notify.withdraw(old)


def _keys_of_sweep(sweep_id: int) -> set[str]:
    """Under which its jobs that died alike are told of now."""
    rows = Incident.objects.filter(attempt__job__sweep=sweep_id, incarnation=None).exclude(fingerprint="")
    alike = rows.order_by().values_list("fingerprint", "overruled_cause").distinct()
    return {_key_of_alike(sweep_id, *one) for one in alike}


def _alike(incident: Incident) -> int:
    """How many jobs of its sweep died so; 0: it is of no sweep."""
    sweep = incident.attempt.job.sweep_id
    if sweep is None or not incident.fingerprint:
        return 0
    same = {"fingerprint": incident.fingerprint, "overruled_cause": incident.overruled_cause, "incarnation": None}
    return Incident.objects.filter(**same, attempt__job__sweep=sweep).values("attempt__job").distinct().count()


def _title(incident: Incident, cause: Cause, alike: int) -> str:
    job = incident.attempt.job
    says = incident.says or f"{cause.heading}."
    if incident.overruled_cause:
        says = f"{cause.heading}, according to {_person(incident)}."
    if alike > 1 and job.sweep is not None:
        return f"{alike} jobs of sweep {job.sweep.name} died alike: {says}"
    return f"{job.name} (#{job.pk}) died: {says}"


def _facts(incident: Incident, cause: Cause, witness: str) -> list[tuple[str, str]]:
    """`witness`: whose word the cause is."""
    attempt = incident.attempt
    is_overruled = incident.overruled_cause == cause.code
    sure = f"overruled by {_person(incident)}" if is_overruled else f"{incident.confidence or 0:.0%} sure"
    nodes = formatting.listed(attempt.nodes[:4]) + (f" and {len(attempt.nodes) - 4} more" if attempt.nodes[4:] else "")
    return [
        ("Cause", f"{cause.code}, {sure}"),
        ("Reported by", witness),
        ("Who must act", ACTS[cause.owner]),
        ("What Vigil did", attempt.decision or "nothing yet"),
        ("Lost", _lost(incident)),
        ("Sign", _sign(incident)),
        ("Attempt", f"{attempt.number}{f' on {nodes}' if nodes else ''}, project {attempt.job.project.slug}"),
        ("Runbook", f"{settings.VIGIL_PUBLIC_URL}{reverse('runbook', args=[cause.code])}"),
    ]


def _person(incident: Incident) -> str:
    return str(incident.overruled_by or "somebody")


def _reported_by(incident: Incident) -> str:
    if incident.overruled_cause:
        return f"{_person(incident)}: {incident.overruled_why}"
    return reported_by(_newest(incident))


def advice_on(incident: Incident, cause: Cause) -> str:
    """Return what to do about a cause; of hardware that no machine confirms, to find out first."""
    is_claim = cause.is_hardware and incident.confirmed_cause != cause.code
    return unconfirmed(cause.advice) if is_claim else cause.advice


def _lost(incident: Incident) -> str:
    """What it had done since the newest checkpoint that is kept; "" where nothing tells of it."""
    attempt = incident.attempt
    if attempt.step is None:
        return ""
    counts = attempt.job.of_kind.counts
    kept = Checkpoint.objects.resumable().filter(job=attempt.job_id, step__lte=attempt.step)
    newest = kept.order_by("-step").values_list("step", flat=True).first()
    if newest is None:
        return f"all of its {formatting.plural(attempt.step, counts)}: there is no checkpoint"
    lost = attempt.step - newest
    since = f"{formatting.plural(lost, counts)} since the checkpoint at {counts} {formatting.count(newest)}"
    return since if lost else ""


def _sign(incident: Incident) -> str:
    """The line that the verdict goes by first."""
    evidence = _newest(incident).get("evidence", ())
    root = next((str(one.get("text", "")) for one in evidence if one.get("role") == "root"), "")
    return root


def _newest(incident: Incident) -> dict[str, Any]:
    """Return the machine's newest verdict; empty while there is none."""
    newest = incident.diagnoses.order_by("-version").first()
    return newest.verdict if newest else {}


def _page(incident: Incident) -> str:
    """Its post-mortem."""
    attempt = incident.attempt
    return f"{reverse('job_postmortem', args=[attempt.job_id])}?attempt={attempt.number}"


def _tell_sysadmins(incident: Incident, cause: Cause) -> None:
    """That they must act: once a cause, node and day."""
    many = _of_day(incident, cause.code, incident.node).count()
    where = f" on {incident.node}" if incident.node else ""
    job = incident.attempt.job
    which = f"{formatting.plural(many, 'attempt')} died of it" if many > 1 else f"{job.name} (#{job.pk}) died of it"
    notify.raise_notice(
        _key_of_site(incident, cause.code, incident.node),
        kind=SITE,
        to=SYSADMINS,
        title=f"{cause.heading}{where}: {which}.",
        detail=cause.advice,
        link=reverse("node", args=[incident.node]) if incident.node else _page(incident),
        tone="warn",
        facts=_facts(incident, cause, reported_by(_newest(incident))),
        settle=TOGETHER,
    )


def _withdraw_of_site(incident: Incident) -> None:
    """Withdraw what sysadmins were told of it, by another verdict, and no incident of that node and day says."""
    nodes = {"", incident.node, *incident.diagnoses.values_list("verdict__node", flat=True)}
    keys = {_key_of_site(incident, code, node or ""): (code, node or "") for code in OF_SITE for node in nodes}
    for key in Notice.objects.standing().filter(key__in=keys).values_list("key", flat=True):
        if not _of_day(incident, *keys[key]).exists():
            notify.withdraw(key)


def _key_of_site(incident: Incident, code: str, node: str) -> str:
    return f"{SITE}:{code}:{incident.at.date()}:{node or incident.pk}"[: notify.MOST_KEY]


def _of_day(incident: Incident, code: str, node: str) -> QuerySet[Incident]:
    """Return the day's incidents with this confirmed cause on the node; without a node only this incident."""
    began = incident.at.replace(hour=0, minute=0, second=0, microsecond=0)
    same = Incident.objects.filter(confirmed_cause=code, node=node, incarnation=None)
    return same.filter(at__gte=began, at__lt=began + timedelta(days=1)) if node else same.filter(pk=incident.pk)
