"""Where the scheduler's jobs meet Vigil's: who holds what on which node, and whose queue a person may look into."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.db.models import Case, Q, QuerySet, Value, When
from django.db.models.functions import StrIndex, Substr

from jobs.listing.sight import sees_all
from jobs.models import Attempt, Job, Stray, Sweep
from jobs.models.attempt import AttemptQuerySet
from nodes.models import QueuedJob
from nodes.schedulers.cluster import HOLDING
from portal.models import User

_KEY = re.compile(r"\.([0-9a-f]{16})\Z")  # what Vigil adds to the name that a person gave


class _Running(NamedTuple):
    """What is asked of a job that runs: of thousands, whole rows would cost three times as much."""

    scheduler_id: str
    name: str
    user: str
    nodes: list[str]
    gpus: int
    gpu_indices: dict[str, list[int]]
    ends_at: datetime | None


@dataclass(frozen=True)
class Held:
    """What one job holds on one node, as one person may see it."""

    scheduler_id: str
    name: str  # "": the site hides other people's
    user: str
    job: Job | None  # Vigil's, where it is one that the person may see
    is_mine: bool
    gpus: tuple[int, ...]  # indices on the node; empty where the scheduler does not tell
    ends_at: datetime | None
    gpu_count: int  # on the node, as far as that can be told


def visible_queue(user: User) -> QuerySet[QueuedJob]:
    """Everybody's jobs, unless the site says that each sees their own and their projects' alone."""
    if sees_all(user):
        return QueuedJob.objects.all()
    known = _alive().filter(job__in=Job.objects.visible_to(user))
    return QueuedJob.objects.filter(_of_person(user) | _of_attempts(known))


def mine(user: User) -> Q:
    """Selects what the person submitted of the queue, through Vigil or past it."""
    return _of_person(user) | _of_attempts(_alive().filter(job__owner=user))


def jobs_of(user: User, scheduler_ids: Iterable[str]) -> dict[str, Job]:
    """Vigil's jobs by the scheduler's id, of those that the person may see."""
    attempts = _alive().filter(scheduler_id__in=set(scheduler_ids), job__in=Job.objects.visible_to(user))
    rows = attempts.with_job().select_related("job__owner", "job__project").order_by("id")
    return {attempt.scheduler_id: attempt.job for attempt in rows}


def sweeps_of(user: User, rows: Iterable[QueuedJob]) -> dict[str, Sweep]:
    """Sweeps by the id of their arrays, whose waiting jobs are one row; of those that the person may see."""
    keys = {row.scheduler_id: found[1] for row in rows if (found := _KEY.search(row.name))}
    known = {
        one.key: one for one in Sweep.objects.visible_to(user).filter(key__in=keys.values()).select_related("owner")
    }
    return {scheduler_id: known[key] for scheduler_id, key in keys.items() if key in known}


def names_of(rows: Iterable[QueuedJob | _Running]) -> dict[str, str]:
    """The names as people gave them, by the scheduler's id. Past Vigil a name may end like one of its keys."""
    rows = list(rows)
    keys = {found[1] for row in rows if (found := _KEY.search(row.name))}
    own = {
        key
        for kind in (Attempt, Sweep, Stray)
        for key in kind.objects.filter(key__in=keys).values_list("key", flat=True)
    }
    named = {}
    for row in rows:
        found = _KEY.search(row.name)
        named[row.scheduler_id] = (found and found[1] in own and row.name[: found.start()]) or row.name
    return named


def held_on(user: User, names: Iterable[str]) -> dict[str, list[Held]]:
    """What runs on each of these nodes: the person's own first."""
    wanted = set(names)
    rows = QueuedJob.objects.filter(state__in=HOLDING).values_list(*_Running._fields)
    running = [row for row in map(_Running._make, rows) if not wanted.isdisjoint(row.nodes)]
    known = jobs_of(user, (row.scheduler_id for row in running))
    given = names_of(running)
    shown = sees_all(user)
    found: dict[str, list[Held]] = {name: [] for name in wanted}
    for row in running:
        job = known.get(row.scheduler_id)
        for node in wanted.intersection(row.nodes):
            found[node].append(_held(row, node, user, job, shown, given[row.scheduler_id]))
    for held in found.values():
        held.sort(key=lambda one: (not one.is_mine, one.gpus, one.scheduler_id))
    return found


def _held(row: _Running, node: str, user: User, job: Job | None, shown: bool, given: str) -> Held:
    own = bool(row.user) and row.user == user.slurm_user or (job is not None and job.owner_id == user.pk)
    known = shown or own or job is not None
    gpus = tuple(row.gpu_indices.get(node, ()))
    return Held(
        scheduler_id=row.scheduler_id,
        name=(job.name if job else given) if known else "",
        user=(job.owner.username if job else row.user) if known else "",
        job=job,
        is_mine=own,
        gpus=gpus,
        ends_at=row.ends_at,
        gpu_count=len(gpus) or -(-row.gpus // max(1, len(row.nodes))),
    )


def _alive() -> AttemptQuerySet:
    return Attempt.objects.alive().confirmed().exclude(scheduler_id="")


def _of_attempts(attempts: AttemptQuerySet) -> Q:
    """Rows of these: their own, and the one of their array, "12" of "12_3", which stands for all that wait."""
    array = Substr("scheduler_id", 1, StrIndex("scheduler_id", Value("_")) - 1)
    tasks = attempts.filter(scheduler_id__contains="_")
    # PostgreSQL refuses a negative length, and may cut before it has filtered.
    arrays = tasks.annotate(array=Case(When(scheduler_id__contains="_", then=array), default=Value("")))
    return Q(scheduler_id__in=attempts.values("scheduler_id")) | Q(scheduler_id__in=arrays.values("array"))


def _of_person(user: User) -> Q:
    return Q(user=user.slurm_user) if user.slurm_user else Q(pk__in=())
