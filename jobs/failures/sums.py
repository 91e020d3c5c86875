"""Maintain sums of allocated time by day and by week."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from jobs.models import JobTime, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.node_time import WEEK, AttemptAllocation, monday

ROWS_PER_STATEMENT = 200  # rows per statement

Key = tuple[Any, ...]
Values = tuple[float, ...]
_ALLOCATED = ("node_s", "gpu_s")
_JOBS = ("jobs_queued_s", "jobs_held_s", "jobs_kept_s")


class SumUpdates:
    """Prepared updates of the sums, read outside the transaction: the lease keeps others from writing meanwhile."""

    def __init__(self, jobs: Sequence[JobTime]) -> None:
        self.jobs = jobs
        self.nodes = _Sums(NodeHeld, ("node",), _ALLOCATED)
        self.by_project = _Sums(ProjectNodeHeld, ("project_id", "node"), _ALLOCATED)
        self.projects = _Sums(ProjectHeld, ("project_id", "partition"), (*_ALLOCATED, *_JOBS))

    @property
    def all(self) -> tuple[_Sums, ...]:
        return self.nodes, self.by_project, self.projects

    def write(self) -> None:
        names = ("project", "partition", "day", "queued_node_s", "held_node_s", "kept_node_s")
        JobTime.objects.bulk_create(self.jobs, update_conflicts=True, unique_fields=["job"], update_fields=names)
        for sums in self.all:
            sums.write()


def prepare(found: Sequence[AttemptAllocation], jobs: Sequence[JobTime]) -> SumUpdates:
    """Return the sums with the allocations of these attempts, and with these jobs' times replaced."""
    updates = SumUpdates(jobs)
    for allocation in found:
        for day, seconds in allocation.days():
            for span in _spans(day):
                for node in allocation.nodes:
                    values = (seconds, seconds * allocation.gpus_per_node)
                    updates.nodes.put((*span, node), values)
                    updates.by_project.put((*span, allocation.project, node), values)
                whole = seconds * max(1, len(allocation.nodes))
                totals = (whole, whole * allocation.gpus_per_node, 0.0, 0.0, 0.0)
                updates.projects.put((*span, allocation.project, allocation.partition), totals)
    _replace_jobs(updates.projects, jobs)
    for sums in updates.all:
        sums.read()
    return updates


class _Sums:
    """Values by key, for one table."""

    def __init__(self, model: Any, names: tuple[str, ...], values: tuple[str, ...]) -> None:
        self.model, self.keys, self.values = model, ("days", "day", *names), values
        self.more: dict[Key, Values] = defaultdict(lambda: (0.0,) * len(values))
        self.rows: list[Any] = []

    def put(self, key: Key, values: Values) -> None:
        self.more[key] = tuple(a + b for a, b in zip(self.more[key], values, strict=True))

    def read(self) -> None:
        """Read the existing rows and calculate the new ones."""
        width, nothing = len(self.keys), (0.0,) * len(self.values)
        there = {tuple(row[:width]): row[width:] for row in self._existing()}
        for key, more in self.more.items():
            before = there.get(key, nothing)
            sums = {name: a + b for name, a, b in zip(self.values, before, more, strict=True)}
            self.rows.append(self.model(**dict(zip(self.keys, key, strict=True)), **sums))

    def _existing(self) -> Iterator[Any]:
        """Yield existing rows of these keys, and possibly others of the same days, if there are too many names for
        one query.
        """
        last_keys: dict[tuple[int, date], set[Any]] = defaultdict(set)
        for key in self.more:
            last_keys[key[0], key[1]].add(key[-1])
        for (days, day), last in last_keys.items():
            rows = self.model.objects.filter(days=days, day=day)
            if len(last) <= ROWS_PER_STATEMENT:
                rows = rows.filter(**{f"{self.keys[-1]}__in": last})
            yield from rows.values_list(*self.keys, *self.values)

    def write(self) -> None:
        unique = [name.removesuffix("_id") for name in self.keys]
        self.model.objects.bulk_create(
            self.rows,
            batch_size=ROWS_PER_STATEMENT,
            update_conflicts=True,
            unique_fields=unique,
            update_fields=list(self.values),
        )


def _spans(day: date) -> Iterator[tuple[int, date]]:
    yield 1, day
    yield WEEK, monday(day)


def _replace_jobs(projects: _Sums, jobs: Sequence[JobTime]) -> None:
    """Subtract these jobs' previous values from the sums, and add the new ones."""
    before = JobTime.objects.in_bulk([job_time.job for job_time in jobs], field_name="job")
    for rows, sign in ((before.values(), -1.0), (jobs, 1.0)):
        for job_time in rows:
            values = (job_time.queued_node_s, job_time.held_node_s, job_time.kept_node_s)
            for span in _spans(job_time.day):
                projects.put(
                    (*span, job_time.project_id, job_time.partition), (0.0, 0.0, *(sign * value for value in values))
                )
