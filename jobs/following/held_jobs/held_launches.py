"""Notify people of jobs that Slurm could not launch and holds: they wait until somebody releases them."""

from __future__ import annotations

from django.urls import reverse

from jobs.following.held_jobs.release_text import release_ways
from jobs.models import Attempt
from nodes.models import Node
from nodes.schedulers.launch import LAUNCH_FAILED, nodes_of
from portal import notify
from portal.models import Notice
from portal.notify import SYSADMINS
from vigil_core import formatting

OWNER, SITE = "job.held", "job.held.site"
MAX_PER_TICK = 100  # a node whose prolog fails may hold a whole queue within minutes


def notify_people() -> None:
    """Raise notices for each such job, once, and withdraw those of jobs that were released or have ended.

    Of many jobs only so many a tick: the next ticks do the rest.
    """
    waiting = Attempt.objects.alive().confirmed().filter(state=Attempt.State.PENDING)
    held = list(waiting.filter(reason__startswith=LAUNCH_FAILED).order_by("pk").values_list("pk", flat=True))
    standing = set(Notice.objects.active().filter(kind__in=(OWNER, SITE)).values_list("key", flat=True))
    new = [pk for pk in held if f"{SITE}:{pk}" not in standing][:MAX_PER_TICK]
    for attempt in Attempt.objects.filter(pk__in=new).with_job().order_by("pk"):
        _raise(attempt)
    gone = standing - {f"{kind}:{pk}" for kind in (OWNER, SITE) for pk in held}
    for key in sorted(gone)[: 2 * MAX_PER_TICK]:
        notify.withdraw(key)


def _raise(attempt: Attempt) -> None:
    nodes = nodes_of(attempt.reason)
    where = f" on {formatting.listed(nodes)}" if nodes else ""
    job, release = attempt.job, release_ways(attempt.scheduler_id, attempt.job_id)
    reasons = Node.objects.filter(name__in=nodes).exclude(reason="").values_list("name", "reason")
    cause = " ".join(f"Slurm's reason for {name}: {reason}." for name, reason in reasons)
    cause = cause or "Usually a prolog failed: see slurmd's log on the node."
    facts = [("Node", ", ".join(nodes)), ("To release it", release)]
    link = reverse("job", args=[job.pk])
    notify.raise_notice(
        f"{OWNER}:{attempt.pk}", kind=OWNER, to=job.owner, tone="warn", link=link, facts=facts,
        title=f"{job.name} does not start: Slurm could not launch it{where} and holds it.",
        detail=f"{cause} Sysadmins have been notified. Once the node is repaired, release it: {release}.",
    )  # fmt: skip
    notify.raise_notice(
        f"{SITE}:{attempt.pk}", kind=SITE, to=SYSADMINS, tone="warn", link=link, facts=facts,
        title=f"Slurm could not launch job #{job.pk} of {job.owner}{where} and holds it.",
        detail=f"{cause} Once the node is repaired, release it: {release}. With"
        " SchedulerParameters=nohold_on_prolog_fail Slurm tries other nodes by itself.",
    )  # fmt: skip
