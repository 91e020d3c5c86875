"""Counts what reliability is told from: the time that nodes were held, failures, and what of a job's time is kept.

Whatever has changed is marked (`is_counted`) and found here by that mark, however late it comes: an attempt once it has
closed, and once; an incident with each version of its verdict, and with a person's word.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.utils import timezone

from jobs import lease
from jobs.failures.incidents import fields_of
from jobs.goodput import SERIES, goodput
from jobs.intake.reports import owner_of
from jobs.lease import Held
from jobs.models import Attempt, Failure, Incident, JobTime, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.held import Holding, default_partition, holdings
from portal.series import read

BUDGET_S = 10.0
ROWS = 200  # of a transaction: reports wait for it on SQLite
FEW = 25  # incidents or jobs between two looks at the lease, as each may take a while
AGAIN = 200  # failures that are looked at once more, by chance, until what follows them is known

Sums = dict[tuple[Any, ...], tuple[float, float]]
Model = TypeVar("Model", NodeHeld, ProjectNodeHeld, ProjectHeld)


def count(budget_s: float = BUDGET_S) -> int:
    """Bring the sums in step with what has happened since, for about so long; how many rows were counted.

    One process does it at a time: of two that read and write sums, one's would be lost.
    """
    now = timezone.now()
    closed = Attempt.objects.filter(is_counted=False).exclude(closed_at=None)
    incidents = Incident.objects.filter(is_counted=False)
    unsettled = Failure.objects.filter(is_settled=False)
    if not (closed.exists() or incidents.exists() or unsettled.exists()):
        return 0
    held = lease.take("reliability")
    if held is None:
        return 0
    try:
        until = time.monotonic() + budget_s
        done = _count_incidents(held, _each(incidents, until, FEW), now)
        again = unsettled.exclude(incident=None).order_by("?").values_list("incident", flat=True)[:AGAIN]
        _count_incidents(held, _each(Incident.objects.filter(pk__in=list(again)), until, FEW), now)
        return done + _count_attempts(held, _each(closed, until, ROWS), now)
    finally:
        held.release()


def _each(rows: Any, until: float, most: int) -> Any:
    """Some rows after the other, by number, until there are none or it is time."""
    last = 0
    while time.monotonic() < until:
        some = list(rows.filter(pk__gt=last).order_by("pk").select_related(*_JOINED[rows.model])[:most])
        if not some:
            return
        yield some
        last = some[-1].pk


_JOINED: dict[Any, tuple[str, ...]] = {Attempt: ("job",), Incident: ()}


def _count_incidents(held: Held, several: Any, now: datetime) -> int:
    done, default = 0, default_partition()
    for some in several:
        joined = Incident.objects.filter(pk__in=[one.pk for one in some]).select_related("attempt__job")
        told = [(one, fields_of(one, default, now)) for one in joined if not one.attempt.is_unconfirmed]
        with held.writing():
            for incident, fields in told:
                _write(incident, fields)
            _mark_strangers(some, {one.pk for one, _ in told})
        done += len(some)
    return done


def _write(incident: Incident, fields: dict[str, Any] | None) -> None:
    """Its failure as it was read; where the incident has changed since, the next look finds it."""
    same = Incident.objects.filter(
        pk=incident.pk, version=incident.version, overruled_cause=incident.overruled_cause, is_final=incident.is_final
    )
    if same.update(is_counted=True) != 1:
        return
    if fields is None:
        Failure.objects.filter(incident=incident).delete()
    else:
        Failure.objects.update_or_create(incident=incident, defaults=fields)


def _mark_strangers(some: Sequence[Incident], known: set[int]) -> None:
    """Of attempts that only somebody says are theirs nothing counts."""
    Incident.objects.filter(pk__in={one.pk for one in some} - known).update(is_counted=True)


def _count_attempts(held: Held, several: Any, now: datetime) -> int:
    done = 0
    for some in several:
        known = {one.pk for one in some if not one.is_unconfirmed and one.started_at is not None}
        found = holdings(Attempt.objects.filter(pk__in=known), now)
        times = _times(held, {one.job_id for one in some}, now)
        with held.writing():
            _add(found)
            for one in times:
                JobTime.objects.update_or_create(job=one.job, defaults=_values(one))
            Attempt.objects.filter(pk__in=[one.pk for one in some]).update(is_counted=True)
        done += len(some)
    return done


def _values(one: JobTime) -> dict[str, Any]:
    names = ("project_id", "partition", "day", "queued_node_s", "held_node_s", "kept_node_s")
    return {name: getattr(one, name) for name in names}


def _add(found: Sequence[Holding]) -> None:
    nodes: Sums = defaultdict(lambda: (0.0, 0.0))
    by_project: Sums = defaultdict(lambda: (0.0, 0.0))
    projects: Sums = defaultdict(lambda: (0.0, 0.0))
    for one in found:
        for day, seconds in one.days():
            for node in one.nodes:
                _put(nodes, (day, node), seconds, one.gpus_per_node)
                _put(by_project, (one.project, day, node), seconds, one.gpus_per_node)
            whole = seconds * max(1, len(one.nodes))
            _put(projects, (day, one.project, one.partition), whole, one.gpus_per_node)
    _upsert(NodeHeld, ("day", "node"), nodes)
    _upsert(ProjectNodeHeld, ("project_id", "day", "node"), by_project)
    _upsert(ProjectHeld, ("day", "project_id", "partition"), projects)


def _put(sums: Sums, key: tuple[Any, ...], seconds: float, gpus: int) -> None:
    node_s, gpu_s = sums[key]
    sums[key] = (node_s + seconds, gpu_s + seconds * gpus)


def _upsert(model: type[Model], names: tuple[str, ...], sums: Sums) -> None:
    """Add to what there is; nobody else writes these meanwhile."""
    if not sums:
        return
    alike = {f"{name}__in": {key[place] for key in sums} for place, name in enumerate(names) if name != "partition"}
    there = {tuple(row[:-2]): row[-2:] for row in _there(model, names, alike)}
    rows = []
    for key, (node_s, gpu_s) in sums.items():
        before = there.get(key, (0.0, 0.0))
        rows.append(model(**dict(zip(names, key, strict=True)), node_s=before[0] + node_s, gpu_s=before[1] + gpu_s))
    unique = [name.removesuffix("_id") for name in names]
    model.objects.bulk_create(
        rows, batch_size=ROWS, update_conflicts=True, unique_fields=unique, update_fields=["node_s", "gpu_s"]
    )


def _there(model: type[Model], names: tuple[str, ...], alike: dict[str, set[Any]]) -> Any:
    columns: list[tuple[Any, ...]] = []
    nodes = sorted(alike.pop("node__in", {None}))
    for at in range(0, len(nodes), ROWS):
        only = {"node__in": nodes[at : at + ROWS]} if nodes != [None] else {}
        columns += model.objects.filter(**alike, **only).values_list(*names, "node_s", "gpu_s")
    return columns


def _times(held: Held, jobs: set[int], now: datetime) -> list[JobTime]:
    """What became of the time of these jobs, of those that have ended and report steps."""
    attempts: dict[int, list[Attempt]] = defaultdict(list)
    rows = Attempt.objects.filter(job__in=jobs).select_related("job", "resume_from").order_by("job", "number")
    for one in rows:
        attempts[one.job_id].append(one)
    owners = [owner_of(one.pk) for several in attempts.values() for one in several]
    told = {owners[place][1] for place in read.ids_of(owners, SERIES).values()}
    default = default_partition()
    found = []
    for number, several in enumerate(attempts.values()):
        if number % FEW == 0:
            held.check()
        if told & {one.pk for one in several} and (one := _time_of(several, default, now)) is not None:
            found.append(one)
    return found


def _time_of(attempts: list[Attempt], default_partition: str, now: datetime) -> JobTime | None:
    last, job = attempts[-1], attempts[-1].job
    if last.ended_at is None or last.closed_at is None:
        return None
    told = goodput(attempts, now)
    if told is None:
        return None
    queued = held = 0.0
    for one in attempts:
        nodes = max(1, len(one.nodes))
        queued += nodes * _seconds(one.submitted_at, one.started_at or one.ended_at)
        held += nodes * _seconds(one.started_at, one.ended_at)
    kept = min(1.0, told.useful_seconds / told.wall_seconds) * held
    return JobTime(
        job=job.pk, project_id=job.project_id, day=last.ended_at.astimezone(UTC).date(), queued_node_s=queued,
        partition=(job.spec.get("resources") or {}).get("partition") or default_partition, held_node_s=held,
        kept_node_s=kept,
    )  # fmt: skip


def _seconds(since: datetime | None, until: datetime | None) -> float:
    return max(0.0, (until - since).total_seconds()) if since and until else 0.0
