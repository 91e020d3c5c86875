"""The sums of held time, by day and by week: what was held is added to what there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from jobs.models import JobTime, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.held import WEEK, Holding, monday

AT_ONCE = 200  # rows of a statement

Key = tuple[Any, ...]
Values = tuple[float, ...]
_HELD = ("node_s", "gpu_s")
_JOBS = ("jobs_queued_s", "jobs_held_s", "jobs_kept_s")


class Added:
    """What is to be written, as it was read outside the transaction: nobody else writes sums meanwhile."""

    def __init__(self, jobs: Sequence[JobTime]) -> None:
        self.jobs = jobs
        self.nodes = _Sums(NodeHeld, ("node",), _HELD)
        self.by_project = _Sums(ProjectNodeHeld, ("project_id", "node"), _HELD)
        self.projects = _Sums(ProjectHeld, ("project_id", "partition"), (*_HELD, *_JOBS))

    @property
    def all(self) -> tuple[_Sums, ...]:
        return self.nodes, self.by_project, self.projects

    def write(self) -> None:
        names = ("project", "partition", "day", "queued_node_s", "held_node_s", "kept_node_s")
        JobTime.objects.bulk_create(self.jobs, update_conflicts=True, unique_fields=["job"], update_fields=names)
        for sums in self.all:
            sums.write()


def added(found: Sequence[Holding], jobs: Sequence[JobTime]) -> Added:
    """What these attempts held, and what became of these jobs' time, each once, added to what there is."""
    made = Added(jobs)
    for one in found:
        for day, seconds in one.days():
            for span in _spans(day):
                for node in one.nodes:
                    held = (seconds, seconds * one.gpus_per_node)
                    made.nodes.put((*span, node), held)
                    made.by_project.put((*span, one.project, node), held)
                whole = seconds * max(1, len(one.nodes))
                told = (whole, whole * one.gpus_per_node, 0.0, 0.0, 0.0)
                made.projects.put((*span, one.project, one.partition), told)
    _put_jobs(made.projects, jobs)
    for sums in made.all:
        sums.read()
    return made


class _Sums:
    """Values by key, of one table."""

    def __init__(self, model: Any, names: tuple[str, ...], values: tuple[str, ...]) -> None:
        self.model, self.keys, self.values = model, ("days", "day", *names), values
        self.more: dict[Key, Values] = defaultdict(lambda: (0.0,) * len(values))
        self.rows: list[Any] = []

    def put(self, key: Key, values: Values) -> None:
        self.more[key] = tuple(a + b for a, b in zip(self.more[key], values, strict=True))

    def read(self) -> None:
        """The rows as they are to be."""
        width, nothing = len(self.keys), (0.0,) * len(self.values)
        there = {tuple(row[:width]): row[width:] for row in self._there()}
        for key, more in self.more.items():
            before = there.get(key, nothing)
            told = {name: a + b for name, a, b in zip(self.values, before, more, strict=True)}
            self.rows.append(self.model(**dict(zip(self.keys, key, strict=True)), **told))

    def _there(self) -> Iterator[Any]:
        """What there is of these, and some beside: by their days, and as many other names as one query takes."""
        wanted: dict[tuple[int, date], set[Any]] = defaultdict(set)
        for key in self.more:
            wanted[key[0], key[1]].add(key[-1])
        for (days, day), last in wanted.items():
            rows = self.model.objects.filter(days=days, day=day)
            if len(last) <= AT_ONCE:
                rows = rows.filter(**{f"{self.keys[-1]}__in": last})
            yield from rows.values_list(*self.keys, *self.values)

    def write(self) -> None:
        unique = [name.removesuffix("_id") for name in self.keys]
        self.model.objects.bulk_create(
            self.rows, batch_size=AT_ONCE, update_conflicts=True, unique_fields=unique, update_fields=list(self.values)
        )


def _spans(day: date) -> Iterator[tuple[int, date]]:
    yield 1, day
    yield WEEK, monday(day)


def _put_jobs(projects: _Sums, jobs: Sequence[JobTime]) -> None:
    """Takes out of the sums what they have of these jobs, and puts in what is so now."""
    before = JobTime.objects.in_bulk([one.job for one in jobs], field_name="job")
    for rows, sign in ((before.values(), -1.0), (jobs, 1.0)):
        for one in rows:
            values = (one.queued_node_s, one.held_node_s, one.kept_node_s)
            for span in _spans(one.day):
                projects.put((*span, one.project_id, one.partition), (0.0, 0.0, *(sign * value for value in values)))
