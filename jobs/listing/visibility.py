"""Match the scheduler's jobs with Vigil's: what runs on which node, and whose queue entries a person may see."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from django.db.models import Case, Q, QuerySet, Value, When
from django.db.models.functions import StrIndex, Substr

from jobs.models import Attempt, Job, Stray, Sweep
from jobs.models.attempt import AttemptQuerySet
from nodes.models import QueuedJob
from nodes.models.json_text import json_text
from nodes.schedulers.cluster import ALLOCATED_STATES
from portal.access import sees_all
from portal.models import User

_names = msgspec.json.Decoder(list[str]).decode
_indices = msgspec.json.Decoder(dict[str, list[int]]).decode
_KEY = re.compile(r"\.([0-9a-f]{16})\Z")  # what Vigil adds to the name given by a person
MAX_LISTED = 200  # ids listed in a statement; with more, the database looks them up itself


class _Running(NamedTuple):
    """The columns needed of a running job: for thousands, whole rows would cost five times as much."""

    scheduler_id: str
    name: str
    user: str
    nodes: list[str]
    gpus: int
    gpu_indices: dict[str, list[int]]
    ends_at: datetime | None


class _VigilJob(NamedTuple):
    """The columns needed of a Vigil job that runs on a node."""

    pk: int
    name: str
    owner_id: int
    owner: str


class NodeAllocation(msgspec.Struct, frozen=True, gc=False):
    """A job's allocation on one node, as one person may see it."""

    scheduler_id: str
    name: str  # "": hidden by the site's settings
    user: str
    job: int | None  # id in Vigil, if the person may see the job
    is_mine: bool
    gpus: tuple[int, ...]  # indices on the node; empty if the scheduler does not report them
    ends_at: datetime | None
    gpu_count: int  # on the node, if known


def visible_queue(user: User) -> QuerySet[QueuedJob]:
    """Return everybody's jobs, or only those of the person and their projects if the site restricts the queue."""
    if sees_all(user):
        return QueuedJob.objects.all()
    return QueuedJob.objects.filter(_of_person(user) | _of_attempts(_visible_attempts(user)))


def submitted_by(user: User) -> Q:
    """Select the queue entries that the person submitted, through Vigil or directly."""
    return _of_person(user) | _of_attempts(_alive().filter(job__owner=user))


def jobs_of(user: User, scheduler_ids: Iterable[str]) -> dict[str, Job]:
    """Return the Vigil jobs that the person may see, by the scheduler's id."""
    attempts = _visible_attempts(user).filter(scheduler_id__in=set(scheduler_ids))
    rows = attempts.with_job().select_related("job__owner", "job__project").order_by("id")
    return {attempt.scheduler_id: attempt.job for attempt in rows}


def sweeps_of(user: User, rows: Iterable[QueuedJob]) -> dict[str, Sweep]:
    """Return the sweeps that the person may see by the id of their arrays, whose pending jobs are one row."""
    keys = {row.scheduler_id: found[1] for row in rows if (found := _KEY.search(row.name))}
    sweeps = {
        sweep.key: sweep
        for sweep in Sweep.objects.visible_to(user).filter(key__in=keys.values()).select_related("owner")
    }
    return {scheduler_id: sweeps[key] for scheduler_id, key in keys.items() if key in sweeps}


def names_of(rows: Iterable[QueuedJob | _Running]) -> dict[str, str]:
    """Return names as people gave them, by the scheduler's id.

    A name from outside Vigil may end like one of its keys.
    """
    named = {row.scheduler_id: row.name for row in rows}
    keyed = {scheduler_id: match for scheduler_id, name in named.items() if (match := _KEY.search(name))}
    if keyed:
        keys = {match[1] for match in keyed.values()}
        vigil_keys = {
            key
            for kind in (Attempt, Sweep, Stray)
            for key in kind.objects.filter(key__in=keys).values_list("key", flat=True)
        }
        named |= {
            scheduler_id: match.string[: match.start()] or match.string
            for scheduler_id, match in keyed.items()
            if match[1] in vigil_keys
        }
    return named


def allocations_on(user: User, names: Iterable[str]) -> dict[str, list[NodeAllocation]]:
    """Return what runs on each of these nodes, the person's own jobs first."""
    wanted = set(names)
    running = [row for row in _running() if not wanted.isdisjoint(row.nodes)]
    vigil_jobs = _vigil_jobs(user, [row.scheduler_id for row in running])
    given = names_of(row for row in running if row.scheduler_id not in vigil_jobs)
    shown = sees_all(user)
    by_node: dict[str, list[NodeAllocation]] = {name: [] for name in wanted}
    for row in running:
        job = vigil_jobs.get(row.scheduler_id)
        for node in wanted.intersection(row.nodes):
            by_node[node].append(_node_allocation(row, node, user, job, shown, given.get(row.scheduler_id, "")))
    for allocations in by_node.values():
        if len(allocations) > 1:
            allocations.sort(key=lambda allocation: (not allocation.is_mine, allocation.gpus, allocation.scheduler_id))
    return by_node


def _running() -> Iterator[_Running]:
    rows = (
        QueuedJob.objects.filter(state__in=ALLOCATED_STATES)
        .order_by()
        .values_list("scheduler_id", "name", "user", json_text("nodes"), "gpus", json_text("gpu_indices"), "ends_at")
    )
    for scheduler_id, name, user, nodes, gpus, gpu_indices, ends_at in rows:
        yield _Running(scheduler_id, name, user, _names(nodes), gpus, _indices(gpu_indices), ends_at)


def _vigil_jobs(user: User, running: Sequence[str]) -> dict[str, _VigilJob]:
    """Return the same as `jobs_of` for running jobs, without loading whole rows."""
    few = len(running) <= MAX_LISTED
    ids = running if few else QueuedJob.objects.filter(state__in=ALLOCATED_STATES).values("scheduler_id")
    rows = _visible_attempts(user).filter(scheduler_id__in=ids).order_by("id")
    jobs = rows.values_list("scheduler_id", "job_id", "job__name", "job__owner_id", "job__owner__username")
    return {scheduler_id: _VigilJob(pk, name, owner_id, owner) for scheduler_id, pk, name, owner_id, owner in jobs}


def _node_allocation(
    row: _Running, node: str, user: User, job: _VigilJob | None, shown: bool, given: str
) -> NodeAllocation:
    belongs_to_user = bool(row.user) and row.user == user.slurm_user or (job is not None and job.owner_id == user.pk)
    is_visible = shown or belongs_to_user or job is not None
    gpus = tuple(row.gpu_indices.get(node, ()))
    return NodeAllocation(
        scheduler_id=row.scheduler_id,
        name=(job.name if job else given) if is_visible else "",
        user=(job.owner if job else row.user) if is_visible else "",
        job=job.pk if job else None,
        is_mine=belongs_to_user,
        gpus=gpus,
        ends_at=row.ends_at,
        gpu_count=len(gpus) or -(-row.gpus // max(1, len(row.nodes))),
    )


def _alive() -> AttemptQuerySet:
    return Attempt.objects.alive().confirmed().exclude(scheduler_id="")


def _visible_attempts(user: User) -> AttemptQuerySet:
    return _alive().filter(job__in=Job.objects.visible_to(user))


def _of_attempts(attempts: AttemptQuerySet) -> Q:
    """Select these attempts' rows, including array rows: "12" stands for all pending tasks such as "12_3"."""
    array = Substr("scheduler_id", 1, StrIndex("scheduler_id", Value("_")) - 1)
    tasks = attempts.filter(scheduler_id__contains="_")
    # PostgreSQL refuses a negative length, and may cut before it has filtered.
    arrays = tasks.annotate(array=Case(When(scheduler_id__contains="_", then=array), default=Value("")))
    return Q(scheduler_id__in=attempts.values("scheduler_id")) | Q(scheduler_id__in=arrays.values("array"))


def _of_person(user: User) -> Q:
    return Q(user=user.slurm_user) if user.slurm_user else Q(pk__in=())
