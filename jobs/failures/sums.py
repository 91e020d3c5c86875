"""The sums of held time, by day and by week: what was held is added to what there is, in the caller's transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, TypeVar

from jobs.models import JobTime, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.held import WEEK, Holding, monday

AT_ONCE = 200  # rows of a statement

Key = tuple[Any, ...]
Values = tuple[float, ...]
Model = TypeVar("Model", NodeHeld, ProjectNodeHeld, ProjectHeld)
_HELD = ("node_s", "gpu_s")
_JOBS = ("jobs_queued_s", "jobs_held_s", "jobs_kept_s")


def add(found: Sequence[Holding], jobs: Sequence[JobTime]) -> None:
    """What these attempts held, and what became of these jobs' time, each once; nobody else writes sums meanwhile."""
    nodes, by_project, projects = _Sums(2), _Sums(2), _Sums(5)
    for one in found:
        for day, seconds in one.days():
            for span in _spans(day):
                for node in one.nodes:
                    held = (seconds, seconds * one.gpus_per_node)
                    nodes.put((*span, node), held)
                    by_project.put((*span, one.project, node), held)
                whole = seconds * max(1, len(one.nodes))
                projects.put((*span, one.project, one.partition), (whole, whole * one.gpus_per_node, 0.0, 0.0, 0.0))
    _add_jobs(projects, jobs)
    _upsert(NodeHeld, ("node",), _HELD, nodes)
    _upsert(ProjectNodeHeld, ("project_id", "node"), _HELD, by_project)
    _upsert(ProjectHeld, ("project_id", "partition"), (*_HELD, *_JOBS), projects)


class _Sums:
    """Values by key."""

    def __init__(self, width: int) -> None:
        self.rows: dict[Key, Values] = defaultdict(lambda: (0.0,) * width)

    def put(self, key: Key, values: Values) -> None:
        self.rows[key] = tuple(a + b for a, b in zip(self.rows[key], values, strict=True))


def _spans(day: date) -> Iterator[tuple[int, date]]:
    yield 1, day
    yield WEEK, monday(day)


def _add_jobs(projects: _Sums, jobs: Sequence[JobTime]) -> None:
    """Takes out of the sums what they have of these jobs, and puts in what is so now."""
    before = JobTime.objects.in_bulk([one.job for one in jobs], field_name="job")
    for rows, sign in ((before.values(), -1.0), (jobs, 1.0)):
        for one in rows:
            values = (one.queued_node_s, one.held_node_s, one.kept_node_s)
            for span in _spans(one.day):
                projects.put((*span, one.project_id, one.partition), (0.0, 0.0, *(sign * value for value in values)))
    names = ("project", "partition", "day", "queued_node_s", "held_node_s", "kept_node_s")
    JobTime.objects.bulk_create(jobs, update_conflicts=True, unique_fields=["job"], update_fields=names)


def _upsert(model: type[Model], names: tuple[str, ...], values: tuple[str, ...], sums: _Sums) -> None:
    if not sums.rows:
        return
    keys = ("days", "day", *names)
    there = {tuple(row[: len(keys)]): row[len(keys) :] for row in _there(model, keys, values, sums)}
    rows = []
    for key, more in sums.rows.items():
        before = there.get(key, (0.0,) * len(values))
        told = {name: a + b for name, a, b in zip(values, before, more, strict=True)}
        rows.append(model(**dict(zip(keys, key, strict=True)), **told))
    unique = [name.removesuffix("_id") for name in keys]
    model.objects.bulk_create(
        rows, batch_size=AT_ONCE, update_conflicts=True, unique_fields=unique, update_fields=list(values)
    )


def _there(model: type[Model], keys: tuple[str, ...], values: tuple[str, ...], sums: _Sums) -> Iterator[Any]:
    """The rows that there are of these, and some beside: by their days, and as many other names as one query takes."""
    wanted: dict[tuple[int, date], set[Any]] = defaultdict(set)
    for key in sums.rows:
        wanted[key[0], key[1]].add(key[-1])
    for (days, day), last in wanted.items():
        rows = model.objects.filter(days=days, day=day)
        if len(last) <= AT_ONCE:
            rows = rows.filter(**{f"{keys[-1]}__in": last})
        yield from rows.values_list(*keys, *values)
